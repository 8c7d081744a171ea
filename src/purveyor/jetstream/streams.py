"""Streams: make, look at, change, empty, seal and remove them; read single messages out of them."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from purveyor.jetstream import headers as header_codec
from purveyor.jetstream.api import Api
from purveyor.jetstream.api_errors import Subject
from purveyor.jetstream.codec import Json, from_wire, parse_time, to_wire
from purveyor.jetstream.config import StreamConfig, StreamInfo
from purveyor.jetstream.headers import Headers
from purveyor.model.errors import AlreadyExists, InvalidInput
from purveyor.model.name_rules import check_name, check_subject


class StoredMessage(NamedTuple):
    """A message as it lies in a stream."""

    stream: str
    sequence: int
    timestamp: datetime | None
    subject: str
    headers: Headers
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """How full a stream is: what those who watch many want to know of each."""

    stream: str
    messages: int
    bytes: int
    last_sequence: int
    oldest: datetime | None
    """When its oldest message was stored; None if it is empty."""
    sealed: bool
    consumers: int


class Streams:
    """The streams of one server or cluster."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def add(self, config: StreamConfig) -> StreamInfo:
        """Create a stream; one that is there with the same settings is fine, with others it is AlreadyExists."""
        config.checked()
        answer = await self._api.ask(f"STREAM.CREATE.{config.name}", to_wire(config), about=Subject(stream=config.name))
        info = from_wire(StreamInfo, answer)
        if config.first_seq and info.state.last_seq + 1 < config.first_seq:  # pragma: no cover - the server refuses
            raise AlreadyExists(f"stream {config.name!r} begins below {config.first_seq}", fix="remove it first")
        return info

    async def info(self, name: str) -> StreamInfo:
        """Its settings and what it holds."""
        return from_wire(StreamInfo, await self.raw_info(name))

    async def raw_info(self, name: str) -> Json:
        """The server's own JSON, with what our types do not know."""
        check_name(name, "stream")
        return await self._api.ask(f"STREAM.INFO.{name}", about=Subject(stream=name))

    async def subjects(self, name: str, pattern: str = ">") -> dict[str, int]:
        """How many messages each subject holds."""
        check_name(name, "stream")
        found: dict[str, int] = {}
        while True:
            answer = await self._api.ask(
                f"STREAM.INFO.{name}",
                {"subjects_filter": check_subject(pattern, wildcards=True), "offset": len(found)},
                about=Subject(stream=name),
            )
            page = answer["state"].get("subjects") or {}
            found |= page
            if not page or len(found) >= int(answer.get("total", 0)):
                return found

    async def names(self, *, subject: str | None = None) -> list[str]:
        """All names, or those of the streams that take a subject."""
        body = {"subject": subject} if subject else None
        return sorted(await self._api.ask_pages("STREAM.NAMES", "streams", body))

    async def list(self) -> "list[StreamInfo]":
        """All streams, by name."""
        found = await self._api.ask_pages("STREAM.LIST", "streams")
        return sorted((from_wire(StreamInfo, item) for item in found), key=lambda info: info.config.name)

    async def fills(self) -> Sequence[Fill]:
        """How full each stream is, asked in pages: for a thousand streams a handful of questions."""
        found = []
        for item in await self._api.ask_pages("STREAM.LIST", "streams"):
            state = item["state"]
            found.append(
                Fill(
                    stream=item["config"]["name"],
                    messages=state["messages"],
                    bytes=state["bytes"],
                    last_sequence=state["last_seq"],
                    oldest=parse_time(state["first_ts"]) if state["messages"] else None,
                    sealed=bool(item["config"].get("sealed")),
                    consumers=state["consumer_count"],
                )
            )
        return found

    async def update(self, name: str, changes: Mapping[str, Any]) -> StreamInfo:
        """Change settings in place. `changes` has our field names; all else stays as the server has it."""
        current = (await self.raw_info(name))["config"]
        wanted = current | {field: to_wire(value) for field, value in changes.items()}
        answer = await self._api.ask(f"STREAM.UPDATE.{name}", wanted, about=Subject(stream=name))
        return from_wire(StreamInfo, answer)

    async def seal(self, name: str) -> StreamInfo:
        """No message in, none deleted, for ever; consumers go on. Sealing twice is the same as once."""
        info = await self.info(name)
        return info if info.config.sealed else await self.update(name, {"sealed": True})

    async def purge(
        self, name: str, *, subject: str | None = None, before_sequence: int | None = None, keep: int | None = None
    ) -> int:
        """Remove messages: all, of a subject, below a sequence, or all but the newest `keep`. Returns how many."""
        if before_sequence is not None and keep is not None:
            raise InvalidInput("purge: give a sequence or a number to keep, not both")
        body: Json = {}
        if subject is not None:
            body["filter"] = check_subject(subject, wildcards=True)
        if before_sequence is not None:
            body["seq"] = before_sequence
        if keep is not None:
            body["keep"] = keep
        check_name(name, "stream")
        answer = await self._api.ask(f"STREAM.PURGE.{name}", body, about=Subject(stream=name))
        return int(answer.get("purged", 0))

    async def remove(self, name: str) -> None:
        """Delete the stream with all it holds."""
        check_name(name, "stream")
        await self._api.ask(f"STREAM.DELETE.{name}", about=Subject(stream=name))

    async def get(self, name: str, sequence: int) -> StoredMessage:
        """The message at a sequence, asked of the leader: never stale."""
        return await self._get(name, {"seq": sequence}, sequence)

    async def get_last(self, name: str, subject: str) -> StoredMessage:
        """The newest message of a subject, asked of the leader: never stale."""
        return await self._get(name, {"last_by_subj": check_subject(subject, wildcards=True)}, 0)

    async def get_next(self, name: str, sequence: int, subject: str = ">") -> StoredMessage:
        """The first message at or after a sequence."""
        return await self._get(name, {"seq": sequence, "next_by_subj": subject}, sequence)

    async def _get(self, name: str, body: Json, sequence: int) -> StoredMessage:
        check_name(name, "stream")
        answer = await self._api.ask(f"STREAM.MSG.GET.{name}", body, about=Subject(stream=name, sequence=sequence))
        message = answer["message"]
        block = base64.b64decode(message.get("hdrs") or "")
        return StoredMessage(
            stream=name,
            sequence=message["seq"],
            timestamp=parse_time(message["time"]),
            subject=message["subject"],
            headers=header_codec.decode(block).headers if block else {},
            data=base64.b64decode(message.get("data") or ""),
        )

    async def delete_message(self, name: str, sequence: int, *, erase: bool = False) -> None:
        """Remove one message; with `erase` its bytes are overwritten as well."""
        check_name(name, "stream")
        await self._api.ask(
            f"STREAM.MSG.DELETE.{name}",
            {"seq": sequence, "no_erase": not erase},
            about=Subject(stream=name, sequence=sequence),
        )
