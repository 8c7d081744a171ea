"""The JetStream API: JSON questions on `$JS.API.>`, its refusals as errors of our tree."""

import asyncio
import json
import time
from typing import Any

from purveyor.jetstream.api_errors import Subject, translate
from purveyor.jetstream.codec import Json
from purveyor.jetstream.connection import Connection
from purveyor.model.errors import ServerUnavailable, SetupError, Unavailable

PREFIX = "$JS.API."


class Api:
    """Asks the JetStream API; a lost server is waited for within the connection's patience.

    Every question here may be asked twice: creating, updating, deleting and purging are the same done twice.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def ask(self, subject: str, body: object = None, *, about: Subject | None = None) -> Json:
        """The parsed answer, or one of our errors."""
        about = about or Subject()
        payload = b"" if body is None else json.dumps(body).encode()
        give_up = time.monotonic() + self.connection.patience_seconds
        pause = 0.05
        while True:
            try:
                return await self._ask_once(subject, payload, about, give_up - time.monotonic())
            except Unavailable:
                if time.monotonic() + pause > give_up:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    async def _ask_once(self, subject: str, payload: bytes, about: Subject, left_seconds: float) -> Json:
        await self.connection.wait_connected(max(left_seconds, 0.1))
        answer = await self.connection.request(PREFIX + subject, payload)
        if answer.status == 503 and not self.connection.offers_jetstream:
            raise SetupError(
                f"the NATS server at {self.connection.address} has no JetStream", fix="start it with JetStream enabled"
            )
        if answer.status == 503:
            raise ServerUnavailable(
                f"{about}: nobody answers the JetStream API at {self.connection.address}",
                fix="is JetStream enabled on that server?",
            )
        parsed: Any = json.loads(answer.data)
        if "error" in parsed:
            raise translate(parsed["error"], about)
        result: Json = parsed
        return result

    async def ask_pages(self, subject: str, key: str, body: Json | None = None) -> list[Any]:
        """All pages of a listing."""
        items: list[Any] = []
        while True:
            page = await self.ask(subject, {**(body or {}), "offset": len(items)})
            found = page.get(key) or []
            items += found
            if not found or len(items) >= int(page.get("total", 0)):
                return items
