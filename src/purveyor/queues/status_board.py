"""The board: what long-running parts say of themselves, in the key-value bucket `status`, for whoever shows it.

A part writes its key again every second or two. When it was written last is the server's word, so a part that is dead
is known by the age of its notice, however it died. Kept in memory: after a restart of the server each part writes anew.
"""

import contextlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from purveyor.jetstream.address import Address
from purveyor.jetstream.codec import to_wire
from purveyor.jetstream.config import Storage
from purveyor.jetstream.key_value import OPERATION, BucketConfig
from purveyor.model import json_fields
from purveyor.model.errors import AlreadyExists, InvalidInput, UnknownMessage, UnknownStream
from purveyor.model.json_fields import Json

if TYPE_CHECKING:
    from purveyor.queues.client import Queues

STATUS: Final = "status"
"""The bucket."""
_STREAM: Final = f"KV_{STATUS}"
_FORGOTTEN: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Notice:
    """What a part said last, and when."""

    key: str
    value: Json
    at: datetime | None


def post(address: Address, key: str, value: Json, *, replicas: int = 1, patience_seconds: float = 2.0) -> None:
    """Write a notice, synchronously: for programs without an event loop."""
    # Here and not at the top: the bulk path brings Arrow, and those who only read have no use for it.
    from purveyor.jetstream.bulk import PublishOptions, outgoing, publish_many  # noqa: PLC0415
    from purveyor.jetstream.bulk.net.api_request import ask  # noqa: PLC0415

    rows = [(f"$KV.{STATUS}.{key}", json_fields.dump(value), None, None)]
    bucket = BucketConfig(name=STATUS, storage=Storage.MEMORY, max_age=_FORGOTTEN, replicas=replicas)
    # Each time: it is gone when the server was started again. One that is there is left as it is.
    with contextlib.suppress(AlreadyExists):
        ask(address, f"STREAM.CREATE.{_STREAM}", to_wire(bucket.stream()), patience_seconds=patience_seconds)
    publish_many(address, outgoing(rows), PublishOptions(expected_stream=_STREAM, patience_seconds=patience_seconds))


async def read(queues: "Queues", prefix: str) -> list[Notice]:
    """The notices whose key begins with a token, by key; none if nobody ever wrote one."""
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
            continue  # gone meanwhile, or nothing that a part of ours wrote
        found.append(Notice(subject.removeprefix(f"$KV.{STATUS}."), value, message.timestamp))
    return found
