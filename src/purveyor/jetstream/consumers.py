"""Consumers: make, look at, change, pause, move and remove them; watch the samples of their acknowledgements."""

import builtins
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

from purveyor.jetstream.api import Api
from purveyor.jetstream.api_errors import Subject
from purveyor.jetstream.codec import Json, format_time, from_wire, parse_time, to_wire
from purveyor.jetstream.config import ConsumerConfig, ConsumerInfo
from purveyor.model.errors import InvalidInput, UnknownConsumer
from purveyor.model.name_rules import check_name

_SAMPLES = "$JS.EVENT.METRIC.CONSUMER.ACK"


class _Action(Enum):
    CREATE = "create"
    UPDATE = "update"
    UPSERT = ""


@dataclass(frozen=True, slots=True)
class AckSample:
    """One sampled acknowledgement: how long it took and at which delivery."""

    stream: str
    consumer: str
    sequence: int
    consumer_sequence: int
    deliveries: int
    delay: timedelta
    timestamp: datetime | None


class Consumers:
    """The consumers of the streams of one server or cluster."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def add(self, stream: str, config: ConsumerConfig) -> ConsumerInfo:
        """Create a consumer; the same again is fine, the same name with other settings is AlreadyExists."""
        return await self._create(stream, config, _Action.CREATE)

    async def set(self, stream: str, config: ConsumerConfig) -> ConsumerInfo:
        """Create it or bring it to these settings; ConfigRefused for those that cannot change."""
        return await self._create(stream, config, _Action.UPSERT)

    async def update(self, stream: str, name: str, changes: Mapping[str, Any]) -> ConsumerInfo:
        """Change settings in place; all else stays as the server has it."""
        current = (await self.raw_info(stream, name))["config"]
        wanted = current | {field: to_wire(value) for field, value in changes.items()}
        return await self._send(stream, name, wanted, _Action.UPDATE)

    async def _create(self, stream: str, config: ConsumerConfig, action: _Action) -> ConsumerInfo:
        config.checked()
        body = to_wire(config)
        name = config.durable_name or config.name or f"eph-{self._api.connection.new_inbox().rpartition('.')[2]}"
        body["name"] = name
        if not config.backoff:
            body.pop("backoff")
        return await self._send(stream, name, body, action)

    async def _send(self, stream: str, name: str, config: Json, action: _Action) -> ConsumerInfo:
        check_name(stream, "stream")
        answer = await self._api.ask(
            f"CONSUMER.CREATE.{stream}.{check_name(name, 'consumer')}",
            {"stream_name": stream, "config": config, "action": action.value},
            about=Subject(stream=stream, consumer=name),
        )
        return from_wire(ConsumerInfo, answer)

    async def info(self, stream: str, name: str) -> ConsumerInfo:
        """Its settings, where it is, what is pending."""
        return from_wire(ConsumerInfo, await self.raw_info(stream, name))

    async def raw_info(self, stream: str, name: str) -> Json:
        """The server's own JSON."""
        check_name(stream, "stream")
        check_name(name, "consumer")
        return await self._api.ask(f"CONSUMER.INFO.{stream}.{name}", about=Subject(stream=stream, consumer=name))

    async def list(self, stream: str) -> "list[ConsumerInfo]":
        """All consumers of a stream, by name."""
        check_name(stream, "stream")
        await self._api.ask(f"STREAM.INFO.{stream}", about=Subject(stream=stream))
        found = await self._api.ask_pages(f"CONSUMER.LIST.{stream}", "consumers")
        return sorted((from_wire(ConsumerInfo, item) for item in found), key=lambda info: info.name)

    async def every(self, stream: str) -> builtins.list[ConsumerInfo]:
        """All consumers of a stream, by name, and surely all: `list` leaves out those without a leader in a cluster.

        One without a leader is waited for.
        """
        check_name(stream, "stream")
        await self._api.ask(f"STREAM.INFO.{stream}", about=Subject(stream=stream))
        found = []
        for name in sorted(await self._api.ask_pages(f"CONSUMER.NAMES.{stream}", "consumers")):
            with contextlib.suppress(UnknownConsumer):  # removed meanwhile
                found.append(await self.info(stream, name))
        return found

    async def remove(self, stream: str, name: str) -> None:
        """Delete it; on an interest stream what only it still wanted goes with it."""
        check_name(stream, "stream")
        check_name(name, "consumer")
        await self._api.ask(f"CONSUMER.DELETE.{stream}.{name}", about=Subject(stream=stream, consumer=name))

    async def pause(self, stream: str, name: str, until: datetime) -> None:
        """Deliver nothing until a time in the future; `resume` ends it early."""
        if until <= datetime.now(UTC):
            raise InvalidInput(f"a pause until {until.isoformat()} is over already", fix="give a time in the future")
        await self._pause(stream, name, {"pause_until": format_time(until)})

    async def resume(self, stream: str, name: str) -> None:
        """End a pause."""
        await self._pause(stream, name, {})

    async def _pause(self, stream: str, name: str, body: Json) -> None:
        check_name(stream, "stream")
        check_name(name, "consumer")
        await self._api.ask(f"CONSUMER.PAUSE.{stream}.{name}", body, about=Subject(stream=stream, consumer=name))

    async def reset(self, stream: str, name: str, sequence: int) -> ConsumerInfo:
        """Move a durable so that `sequence` comes next. On an interest stream that frees what all have passed."""
        check_name(stream, "stream")
        check_name(name, "consumer")
        await self._api.ask(
            f"CONSUMER.RESET.{stream}.{name}", {"seq": sequence}, about=Subject(stream=stream, consumer=name)
        )
        return await self.info(stream, name)

    async def samples(
        self, stream: str, name: str, *, on_ready: Callable[[], None] | None = None
    ) -> AsyncGenerator[AckSample]:
        """The sampled acknowledgements as they happen, for a consumer with `sample_freq`.

        `on_ready` is called once none that happens from now on will be missed.
        """
        check_name(stream, "stream")
        subject = f"{_SAMPLES}.{stream}.{check_name(name, 'consumer')}"
        listening = await self._api.connection.subscribe(subject, confirm=True)
        try:
            if on_ready is not None:
                on_ready()
            async for message in listening:
                yield _sample(json.loads(message.data))
        finally:
            await listening.close()


def _sample(event: Json) -> AckSample:
    return AckSample(
        stream=event["stream"],
        consumer=event["consumer"],
        sequence=event["stream_seq"],
        consumer_sequence=event["consumer_seq"],
        deliveries=event["deliveries"],
        delay=timedelta(microseconds=event["ack_time"] / 1000),
        timestamp=parse_time(event["timestamp"]),
    )
