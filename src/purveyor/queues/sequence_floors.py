"""Where the queues of a name have ended: so that the sequences of a name never begin anew, however often it is used.

Noted under `<name>.sequence` in the bucket of the registry before a queue is removed, and never taken back. A queue
that somebody removed by hand has no note; then what was handed out of it tells, for that stands in the book of its
deliveries (`model.done.Acknowledged`).
"""

import asyncio
import base64
import contextlib
from typing import TYPE_CHECKING

from purveyor.jetstream.address import Address
from purveyor.jetstream.key_value import Bucket, BucketConfig
from purveyor.model.ack_ranges import DELIVERY_STATE, Acknowledged
from purveyor.model.errors import UnknownMessage, UnknownStream, UnreadableRecord, WrongRevision
from purveyor.model.name_rules import check_subscription_name
from purveyor.model.stored_record import UPGRADE
from purveyor.queues.registry import ACKNOWLEDGED, SUBSCRIPTIONS

if TYPE_CHECKING:
    from purveyor.queues.client import Queues


class QueueEnds:
    """The notes, for programs with an event loop."""

    def __init__(self, subscriptions: Bucket, acknowledged: Bucket) -> None:
        self._subscriptions = subscriptions
        self._acknowledged = acknowledged

    @classmethod
    async def open(cls, queues: "Queues", *, replicas: int = 1) -> "QueueEnds":
        """The notes of a server; its buckets are made if they are not there."""
        wanted = (BucketConfig(name=name, replicas=replicas) for name in (SUBSCRIPTIONS, ACKNOWLEDGED))
        return cls(*[await queues.bucket(config) for config in wanted])

    async def note(self, name: str, last: int) -> None:
        """A queue of that name has come to a sequence, and is about to be removed."""
        while True:
            entry = await self._subscriptions.newest(_key(name))
            if entry is not None and _number(entry.value) >= last:
                return
            with contextlib.suppress(WrongRevision):
                await self._subscriptions.update(_key(name), b"%d" % last, entry.revision if entry is not None else 0)

    async def last(self, name: str) -> int:
        """The highest sequence that is known of all queues of a name; 0 if none is."""
        noted, book = await asyncio.gather(self._subscriptions.newest(_key(name)), self._acknowledged.newest(name))
        return _highest(noted.value if noted is not None else b"", book.value if book is not None else b"")


def last_sequence(address: Address, name: str) -> int:
    """As `QueueEnds.last`, synchronously."""
    return _highest(_newest(address, SUBSCRIPTIONS, _key(name)), _newest(address, ACKNOWLEDGED, name))


def _key(name: str) -> str:
    return f"{check_subscription_name(name)}.sequence"


def _newest(address: Address, bucket: str, key: str) -> bytes:
    from purveyor.jetstream.bulk.net.api_request import ask  # noqa: PLC0415 - it brings Arrow, which the other side does not need

    try:
        answer = ask(address, f"STREAM.MSG.GET.KV_{bucket}", {"last_by_subj": f"$KV.{bucket}.{key}"})
    except (UnknownMessage, UnknownStream):
        return b""
    return base64.b64decode(answer["message"].get("data") or "")


def _highest(noted: bytes, book: bytes) -> int:
    """Pure. UnreadableRecord if one of them is not understood: a queue made by guess could use a sequence twice."""
    found = _number(noted)
    return max(found, DELIVERY_STATE.read(book, Acknowledged.from_json).last_sequence) if book else found


def _number(noted: bytes) -> int:
    """What was noted; 0 for nothing. A note of version 1 is the number alone; a later one begins with a letter."""
    if not noted:
        return 0
    if not noted.isdigit():
        raise UnreadableRecord("the note where a queue ended is no number", fix=UPGRADE)
    return int(noted)
