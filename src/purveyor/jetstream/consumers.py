"""Consumers: create, inspect, update, pause, reset and delete them; receive samples of their acknowledgements."""

import builtins
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

from purveyor.jetstream.api import Api, Json, Resource, format_time, parse_time
from purveyor.jetstream.config import ConsumerConfig, ConsumerInfo, from_wire, to_wire
from purveyor.model.errors import InvalidInput, UnknownConsumer
from purveyor.model.name_rules import check_name

_SAMPLES = "$JS.EVENT.METRIC.CONSUMER.ACK"


class _Action(Enum):
    CREATE = "create"
    UPDATE = "update"
    UPSERT = ""


@dataclass(frozen=True, slots=True)
class AckSample:
    """One sampled acknowledgement: its delay and the number of deliveries."""

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
        """Create a consumer. An existing one with the same settings is returned; with others, raise AlreadyExists."""
        return await self._create(stream, config, _Action.CREATE)

    async def set(self, stream: str, config: ConsumerConfig) -> ConsumerInfo:
        """Create or update a consumer; raise ConfigRefused for settings that cannot change."""
        return await self._create(stream, config, _Action.UPSERT)

    async def update(self, stream: str, name: str, changes: Mapping[str, Any]) -> ConsumerInfo:
        """Update settings in place; other settings stay unchanged."""
        current = (await self.raw_info(stream, name))["config"]
        wanted = current | {field: to_wire(value) for field, value in changes.items()}
        return await self._send(stream, name, wanted, _Action.UPDATE)

    async def _create(self, stream: str, config: ConsumerConfig, action: _Action) -> ConsumerInfo:
        config.validated()
        body = to_wire(config)
        name = config.durable_name or config.name or f"eph-{self._api.connection.new_inbox().rpartition('.')[2]}"
        body["name"] = name
        if not config.backoff:
            body.pop("backoff")
        return await self._send(stream, name, body, action)

    async def _send(self, stream: str, name: str, config: Json, action: _Action) -> ConsumerInfo:
        check_name(stream, "stream")
        reply = await self._api.request(
            f"CONSUMER.CREATE.{stream}.{check_name(name, 'consumer')}",
            {"stream_name": stream, "config": config, "action": action.value},
            about=Resource(stream=stream, consumer=name),
        )
        return from_wire(ConsumerInfo, reply)

    async def info(self, stream: str, name: str) -> ConsumerInfo:
        """Return settings, position and pending messages of a consumer."""
        return from_wire(ConsumerInfo, await self.raw_info(stream, name))

    async def raw_info(self, stream: str, name: str) -> Json:
        """Return the server's JSON."""
        check_name(stream, "stream")
        check_name(name, "consumer")
        return await self._api.request(f"CONSUMER.INFO.{stream}.{name}", about=Resource(stream=stream, consumer=name))

    async def list(self, stream: str) -> "list[ConsumerInfo]":
        """Return the consumers of a stream, sorted by name. In a cluster those without a leader are missing."""
        check_name(stream, "stream")
        await self._api.request(f"STREAM.INFO.{stream}", about=Resource(stream=stream))
        found = await self._api.request_pages(f"CONSUMER.LIST.{stream}", "consumers")
        return sorted((from_wire(ConsumerInfo, item) for item in found), key=lambda info: info.name)

    async def list_complete(self, stream: str) -> builtins.list[ConsumerInfo]:
        """Return all consumers of a stream, sorted by name; wait for those without a leader."""
        check_name(stream, "stream")
        await self._api.request(f"STREAM.INFO.{stream}", about=Resource(stream=stream))
        found = []
        for name in sorted(await self._api.request_pages(f"CONSUMER.NAMES.{stream}", "consumers")):
            with contextlib.suppress(UnknownConsumer):  # deleted meanwhile
                found.append(await self.info(stream, name))
        return found

    async def remove(self, stream: str, name: str) -> None:
        """Delete a consumer. An interest stream also deletes the messages that only this consumer still needed."""
        check_name(stream, "stream")
        check_name(name, "consumer")
        await self._api.request(f"CONSUMER.DELETE.{stream}.{name}", about=Resource(stream=stream, consumer=name))

    async def pause(self, stream: str, name: str, until: datetime) -> None:
        """Stop deliveries until a time in the future; `resume` ends the pause early."""
        if until <= datetime.now(UTC):
            raise InvalidInput(f"a pause until {until.isoformat()} is over already", fix="give a time in the future")
        await self._pause(stream, name, {"pause_until": format_time(until)})

    async def resume(self, stream: str, name: str) -> None:
        """End a pause."""
        await self._pause(stream, name, {})

    async def _pause(self, stream: str, name: str, body: Json) -> None:
        check_name(stream, "stream")
        check_name(name, "consumer")
        await self._api.request(f"CONSUMER.PAUSE.{stream}.{name}", body, about=Resource(stream=stream, consumer=name))

    async def reset(self, stream: str, name: str, sequence: int) -> ConsumerInfo:
        """Move a durable to `sequence`. An interest stream then deletes the messages that all durables have passed."""
        check_name(stream, "stream")
        check_name(name, "consumer")
        await self._api.request(
            f"CONSUMER.RESET.{stream}.{name}", {"seq": sequence}, about=Resource(stream=stream, consumer=name)
        )
        return await self.info(stream, name)

    async def samples(
        self, stream: str, name: str, *, on_ready: Callable[[], None] | None = None
    ) -> AsyncGenerator[AckSample]:
        """Yield the sampled acknowledgements of a consumer with `sample_freq` as they happen.

        `on_ready` is called once the subscription is active: no later sample is missed.
        """
        check_name(stream, "stream")
        subject = f"{_SAMPLES}.{stream}.{check_name(name, 'consumer')}"
        subscription = await self._api.connection.subscribe(subject, confirm=True)
        try:
            if on_ready is not None:
                on_ready()
            async for message in subscription:
                yield _sample(json.loads(message.data))
        finally:
            await subscription.close()


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
