"""The status board: the state of long-running parts in the key-value bucket `status`, for the console and the CLI.

A part writes its notice again every second or two. The server stamps the time of each write, so readers recognise a
dead part by the age of its notice. The bucket is in memory: after a restart of the server each part writes again.
"""

import contextlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from purveyor.jetstream.address import Address
from purveyor.jetstream.config import Storage, to_wire
from purveyor.jetstream.key_value import OPERATION, BucketConfig
from purveyor.model import json_fields
from purveyor.model.errors import AlreadyExists, InvalidInput, UnknownMessage, UnknownStream
from purveyor.model.json_fields import Json

if TYPE_CHECKING:
    from purveyor.queues.client import Queues

STATUS: Final = "status"
"""The name of the bucket."""
_STREAM: Final = f"KV_{STATUS}"
SILENT_SECONDS: Final = 20.0
"""A part that does not write for this time hangs or died: a healthy one writes every two seconds."""
STANDBY_PREFIX: Final = "standby"
"""The first token of the keys of pipelines that stand by."""
_NOTICE_AGE: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Notice:
    """The last notice of a part, and when it was written."""

    key: str
    value: Json
    at: datetime | None


def post_notice(address: Address, key: str, value: Json, *, replicas: int = 1, patience_seconds: float = 2.0) -> None:
    """Write a notice from a program without an event loop."""
    # Imported here because the bulk path loads Arrow, which readers of the board do not need.
    from purveyor.jetstream.bulk import PublishOptions, outgoing, publish_many  # noqa: PLC0415
    from purveyor.jetstream.bulk.net.pool import request_api  # noqa: PLC0415

    rows = [(f"$KV.{STATUS}.{key}", json_fields.dump(value), None, None)]
    bucket = _bucket(replicas)
    # At each write: a restart of the server loses the bucket. An existing bucket stays unchanged.
    with contextlib.suppress(AlreadyExists):
        request_api(address, f"STREAM.CREATE.{_STREAM}", to_wire(bucket.stream()), patience_seconds=patience_seconds)
    publish_many(address, outgoing(rows), PublishOptions(expected_stream=_STREAM, patience_seconds=patience_seconds))


async def write_notice(queues: "Queues", key: str, value: Json, *, replicas: int = 1) -> None:
    """Write a notice from a program with a connection."""
    bucket = await queues.bucket(_bucket(replicas))  # at each write: a restart of the server loses the bucket
    await bucket.put(key, json_fields.dump(value))


async def delete_notice(queues: "Queues", key: str, *, replicas: int = 1) -> None:
    """Delete the notice of a part that stops."""
    await (await queues.bucket(_bucket(replicas))).purge(key)


def _bucket(replicas: int) -> BucketConfig:
    return BucketConfig(name=STATUS, storage=Storage.MEMORY, max_age=_NOTICE_AGE, replicas=replicas)


async def read_notices(queues: "Queues", prefix: str) -> list[Notice]:
    """Return the notices whose keys begin with a token, sorted by key."""
    try:
        subjects = await queues.streams.subjects(_STREAM, f"$KV.{STATUS}.{prefix}.>")
    except UnknownStream:
        return []
    found: list[Notice] = []
    for subject in sorted(subjects):
        try:
            message = await queues.streams.get_last(_STREAM, subject)
            if OPERATION in message.headers:
                continue
            value = json_fields.parse(message.data, "notice")
        except (UnknownMessage, UnknownStream, InvalidInput):
            continue  # deleted in the meantime, or written by another program
        found.append(Notice(subject.removeprefix(f"$KV.{STATUS}."), value, message.timestamp))
    return found
