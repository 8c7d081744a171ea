"""A consumer in Python: keeps a copy of the users of a subscription in a file.

    pip install 'purveyor[client]'
    python consumer.py http://127.0.0.1:7777 crm users.json     (the password is in CRM_PASSWORD: <NAME>_PASSWORD)

Start it twice: the second instance waits and takes over when the first ends. Ctrl-C ends it after the current message.
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
    """The copy. Each change writes a new file that replaces the old one, so that a crash leaves a whole file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._users: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    async def handle(self, message: Message) -> None:
        """Apply one event. After a crash before its acknowledgement it comes again: that changes nothing."""
        key = (message.new or message.old).get("uuid")
        if key is None:
            await message.reject("the event has no uuid")
            return
        if message.new:
            self._users[key] = dict(message.new)
        else:
            self._users.pop(key, None)
        new_file = self._file.with_suffix(".next")
        new_file.write_text(json.dumps(self._users))
        new_file.replace(self._file)
        print(f"{message.topic} {key}: {'changed' if message.new else 'deleted'}", flush=True)


async def main(url: str, name: str, file: str) -> None:
    """Run until a signal stops it."""
    users = Users(Path(file))
    async with Consumer(url, name, password=os.environ[f"{name.upper()}_PASSWORD"]) as consumer:
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, consumer.stop)
        await consumer.run(users.handle)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main(*sys.argv[1:]))
