"""The JetStream API: JSON questions on `$JS.API.>`, the server's reasons translated into our error tree."""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from purveyor.model.errors import (
    AlreadyExists,
    ConfigRefused,
    NoAnswer,
    PublishRefused,
    PurveyorError,
    Refused,
    ServerUnavailable,
    SetupError,
    Unavailable,
    UnknownConsumer,
    UnknownMessage,
    UnknownStream,
    WrongRevision,
)
from purveyor.queues.codec import Json
from purveyor.queues.connection import Connection

PREFIX = "$JS.API."

# The server's exact reasons (its err_code), as far as a caller acts on them.
STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
CONSUMER_DOES_NOT_EXIST = 10149
MESSAGE_NOT_FOUND = 10037
STREAM_NAME_IN_USE = 10058
CONSUMER_NAME_IN_USE = 10013
CONSUMER_EXISTS = 10148
SUBJECTS_OVERLAP = 10065
STREAM_SEALED = 10109
WRONG_LAST_SEQUENCE = 10071
WRONG_LAST_SEQUENCE_UNKNOWN = 10164
JETSTREAM_UNAVAILABLE = 10008
JETSTREAM_NOT_ENABLED = (10039, 10076)
NO_SUITABLE_PEERS = 10005

_FIXES = {
    SUBJECTS_OVERLAP: "another stream takes one of these subjects; see `purveyor stream ls`",
    STREAM_SEALED: "the stream is sealed; wait for its migration, or remove it",
    10047: "free disk space, or raise max_file_store",
    10077: "the stream is at its limit of messages and discards new ones",
    10054: "the message is larger than the stream's maximum",
    10122: "the stream is at its limit of messages per subject",
    10099: "a work queue takes one consumer per subject: remove it, or use an interest stream",
    10100: "consumers of a work queue may not overlap: give each its own filter",
    10101: "a work queue's consumer must deliver all",
    10098: "a work queue's consumer must acknowledge explicitly",
    NO_SUITABLE_PEERS: "the cluster has too few servers for that many replicas",
    10074: "replicas need a cluster of that many servers",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """What a question is about, for the words of an error."""

    stream: str = ""
    consumer: str = ""
    sequence: int = 0

    def __str__(self) -> str:
        if self.consumer:
            return f"consumer {self.consumer!r} of stream {self.stream!r}"
        return f"stream {self.stream!r}" if self.stream else "JetStream"


def translate(error: Json, about: Subject, *, publishing: bool = False) -> PurveyorError:
    """The server's `{code, err_code, description}` as one of our errors. Pure."""
    code, err_code = int(error.get("code", 500)), int(error.get("err_code", 0))
    text = str(error.get("description", "unknown error"))
    numbers: dict[str, int] = {"code": code, "err_code": err_code}
    if err_code == STREAM_NOT_FOUND:
        return UnknownStream(f"no stream {about.stream!r}", fix="`purveyor stream ls` lists them")
    if err_code in (CONSUMER_NOT_FOUND, CONSUMER_DOES_NOT_EXIST):
        return UnknownConsumer(
            f"no consumer {about.consumer!r} on stream {about.stream!r}",
            fix=f"`purveyor consumer ls {about.stream}` lists them",
        )
    if err_code == MESSAGE_NOT_FOUND:
        where = f" at sequence {about.sequence}" if about.sequence else ""
        return UnknownMessage(f"no message{where} in stream {about.stream!r}")
    if err_code == JETSTREAM_UNAVAILABLE:
        return NoAnswer(f"JetStream has no leader at the moment ({text})", fix="try again")
    if err_code in JETSTREAM_NOT_ENABLED:
        return SetupError(f"JetStream is not enabled: {text}", fix="enable it for the server and the account")
    if err_code in (WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_UNKNOWN):
        return WrongRevision(f"{about}: {text}", fix="read again, then write", **numbers)
    fix = _FIXES.get(err_code)
    message = f"{about}: {text} (code {code}, {err_code})"
    if publishing:
        return PublishRefused(f"message not stored in {message}", fix=fix, **numbers)
    if err_code in (STREAM_NAME_IN_USE, CONSUMER_NAME_IN_USE, CONSUMER_EXISTS):
        return AlreadyExists(message, fix="choose another name, or update what is there", **numbers)
    if code == 503:
        return NoAnswer(message, fix="try again")
    return (ConfigRefused if code in (400, 500) else Refused)(message, fix=fix, **numbers)


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
