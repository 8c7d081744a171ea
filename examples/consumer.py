"""A consumer in Python: keeps a copy of the users that a subscription tells of, in a file.

    pip install 'purveyor[client]'
    python consumer.py http://127.0.0.1:7777 ox users.json      (the password is in OX_PASSWORD: <NAME>_PASSWORD)

Start it twice, and the second stands by. Ctrl-C ends it when the message at hand is done.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from purveyor import Consumer, Message


class Users:
    """The copy: written to a file beside it that then takes its place, so that a crash leaves the one or the other."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._users: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    async def handle(self, message: Message) -> None:
        """One event. It may come twice, after a crash between here and its acknowledgement: that changes nothing."""
        key = (message.new or message.old).get("uuid")
        if key is None:
            await message.reject("no uuid, so nobody knows whom it is about")
            return
        if message.new:
            self._users[key] = dict(message.new)
        else:
            self._users.pop(key, None)
        beside = self._file.with_suffix(".next")
        beside.write_text(json.dumps(self._users))
        beside.replace(self._file)
        print(f"{message.topic} {key}: {'changed' if message.new else 'deleted'}", flush=True)


async def main(url: str, name: str, file: str) -> None:
    """Until somebody stops it."""
    users = Users(Path(file))
    async with Consumer(url, name, password=os.environ[f"{name.upper()}_PASSWORD"]) as consumer:
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, consumer.stop)
        await consumer.run(users.handle)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main(*sys.argv[1:]))
