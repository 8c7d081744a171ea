"""The new stream: where the old one ended, with its durables, before publishers can notice that it was gone for long.

The order makes each step safe to repeat, by whoever comes after a crash:

1. The stream, from the sequence behind the old one's last: a late acknowledgement of an old message means nothing in
   it. One that is to have interest retention begins with limits: it may be written to at once, and has no durable yet.
2. The durables.
3. The retention.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from purveyor.jetstream.api import Api
from purveyor.jetstream.api_errors import NO_SUITABLE_PEERS, Subject
from purveyor.jetstream.codec import Json
from purveyor.model.errors import AlreadyExists, ConfigRefused, NoAnswer, Refused, UnknownConsumer, UnknownStream
from purveyor.queues.migration.record import CONTINUES, Record
from purveyor.queues.migration.steps import Step

_log = logging.getLogger("purveyor.migration")
_INTEREST = "interest"
NAME_IN_USE = (10058, 10130)
_RESTORE_FAILED = 10062
_ATTEMPTS = 200
_RESTORES = 5
_AGAIN_SECONDS = 0.1


def parked_config(record: Record) -> Json:
    """How a stream is brought back from disk: under a subject of its own, so that nobody writes to it. Pure."""
    return first_config(record) | {"subjects": [f"_purveyor.migrating.{record.queue}"]}


def is_parked(config: Json, record: Record) -> bool:
    """Whether a stream has not been seen to hold everything yet. Pure."""
    return bool(list(config.get("subjects") or ()) == parked_config(record)["subjects"])


def first_config(record: Record) -> Json:
    """How the new stream begins. Pure."""
    return record.target | {"retention": "limits"} if record.target["retention"] == _INTEREST else record.target


async def create(api: Api, record: Record) -> None:
    """Step 1. Made already by somebody else is fine, if it is the one that goes on from the old stream."""
    assert record.last_sequence is not None
    config = first_config(record) | {"first_seq": record.last_sequence + 1}

    async def ask() -> None:
        await api.ask(f"STREAM.CREATE.{record.stream}", config, about=Subject(stream=record.stream))

    await in_its_place(api, record, ask)


async def in_its_place(api: Api, record: Record, make: Callable[[], Awaitable[None]]) -> None:
    """Make the new stream where the old one was; made by somebody else meanwhile is fine.

    In a cluster the name may be taken for a moment longer than the stream is there.
    """
    for attempt in range(_ATTEMPTS):
        try:
            await make()
        except Refused as error:
            broken = error.err_code == _RESTORE_FAILED and attempt < _RESTORES  # the archive is whole: once more
            if error.err_code == NO_SUITABLE_PEERS:
                raise NoAnswer(
                    f"stream {record.stream!r} cannot be made while a node is away: {error.message}",
                    fix="bring the node back; its migration goes on by itself",
                ) from error
            if error.err_code not in NAME_IN_USE and not broken:
                raise
            if await _is_there(api, record):
                return
            refused: Refused = error
        else:
            return
        await asyncio.sleep(_AGAIN_SECONDS)
    raise refused


async def _is_there(api: Api, record: Record) -> bool:
    """Whether the new stream is there; an error if it is one that nobody told us of."""
    try:
        live = await api.ask(f"STREAM.INFO.{record.stream}", about=Subject(stream=record.stream))
    except UnknownStream:
        return False
    if goes_on(live["config"], record.created):
        return True
    if str(live["created"]) == record.created:
        return False
    raise AlreadyExists(f"stream {record.stream!r} was made anew by somebody else", fix="look what it holds")


async def finish(api: Api, record: Record, reached: Callable[[Step], None]) -> None:
    """Steps 2 and 3, and whatever else differs in place."""
    about = Subject(stream=record.stream)
    for durable in record.durables:
        await make_durable(api, record.stream, durable)
    reached(Step.READERS_MADE)
    live = (await api.ask(f"STREAM.INFO.{record.stream}", about=about))["config"]
    if live["retention"] != record.target["retention"]:
        wanted: dict[str, Any] = live | {"retention": record.target["retention"]}
        await api.ask(f"STREAM.UPDATE.{record.stream}", wanted, about=about)
    reached(Step.CONVERTED)


async def make_durable(api: Api, stream: str, config: Json) -> None:
    """One durable; there already is fine."""
    name = config["durable_name"]
    about = Subject(stream=stream, consumer=name)
    try:
        await api.ask(f"CONSUMER.INFO.{stream}.{name}", about=about)
    except UnknownConsumer:
        body = {"stream_name": stream, "config": config, "action": "create"}
        try:
            await api.ask(f"CONSUMER.CREATE.{stream}.{name}", body, about=about)
        except AlreadyExists:
            return
        except ConfigRefused as error:  # one that joined and does not fit, say beside another of a work queue
            _log.warning("durable '%s' of stream '%s' cannot be made: %s", name, stream, error)


def goes_on(config: Json, created: str) -> bool:
    """Whether a stream's settings say that it goes on from the one made at that time."""
    return created in str((config.get("metadata") or {}).get(CONTINUES, "")).split()
