"""The replay of a subscription that has not begun, at most one: key `<name>.replay` of the registry's bucket.

It has its own key, because the prefill state belongs to the job that fills the queue: any other write to that state
ends the job. Delivery writes the record before it stores the job on the queue `prefill`. The prefill worker deletes the
record when it begins the job or gives it up. The job itself is only on the queue: the record only decides whether
delivery accepts another replay.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from purveyor.jetstream.key_value import Bucket
from purveyor.model import json_fields
from purveyor.model.errors import AlreadyExists, InvalidInput, Unavailable, WrongRevision
from purveyor.model.json_fields import (
    Json,
    Kind,
    field_names,
    moment_field,
    read_fields,
    text_field,
    whole_field,
    write_fields,
)
from purveyor.model.name_rules import check_subscription_name

_FIELDS: Final = (
    text_field("incarnation"),
    text_field("job"),
    moment_field("at"),
    whole_field("sequence", default=None),
)
WAITING_REPLAY: Final = Kind("waiting replay", field_names(_FIELDS))

_ATTEMPTS: Final = 20
_STORED_WITHIN: Final = timedelta(minutes=1)
"""A record without a sequence that is older was left by a crash before the job was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingReplay:
    """A replay that was accepted and has not begun."""

    incarnation: str
    job: str
    at: datetime
    sequence: int | None = None
    """The sequence of the job in the queue `prefill`; None until the job is stored."""

    def to_json(self) -> Json:
        """Return the fields of the record."""
        return write_fields(_FIELDS, self)

    @classmethod
    def from_json(cls, data: object) -> "WaitingReplay":
        """Build it from checked fields; InvalidInput names the wrong one."""
        return cls(**read_fields(_FIELDS, WAITING_REPLAY.check(data), WAITING_REPLAY.what))

    def is_waiting(self, now: datetime, *, first_sequence: int, begun: str | None) -> bool:
        """Whether the job can still be on the queue `prefill` and has not begun. Pure.

        `first_sequence` is that of the queue, `begun` the job that the prefill state names. They matter where the
        record was not deleted: the queue was purged, or a worker of a version without these records ran the job.

        >>> found_record = WaitingReplay(incarnation="i", job="j", at=datetime(2026, 1, 1, tzinfo=UTC), sequence=7)
        >>> [found_record.is_waiting(found_record.at, first_sequence=first, begun=None) for first in (7, 8)]
        [True, False]
        >>> found_record.is_waiting(found_record.at, first_sequence=7, begun="j")
        False
        """
        if self.job == begun:
            return False
        if self.sequence is None:
            return now - self.at < _STORED_WITHIN
        return self.sequence >= first_sequence


_Change = Callable[[WaitingReplay | None], WaitingReplay | None]


class WaitingReplays:
    """The waiting replays of all subscriptions. Every write is a compare-and-set.

    A record that this program does not understand is an UnreadableRecord, and stays as it is.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    async def find(self, name: str) -> WaitingReplay | None:
        """Return the record of a subscription; None if there is none."""
        return (await self._read(name))[0]

    async def claim(self, name: str, wanted: WaitingReplay, *, first_sequence: int, begun: str | None) -> None:
        """Write that a replay waits; AlreadyExists names the one that waits already. See `WaitingReplay.is_waiting`."""

        def change(found_record: WaitingReplay | None) -> WaitingReplay:
            if (
                found_record is not None
                and found_record.incarnation == wanted.incarnation
                and found_record.is_waiting(datetime.now(UTC), first_sequence=first_sequence, begun=begun)
            ):
                raise AlreadyExists(
                    f"a replay of subscription {name!r} waits already, job {found_record.job}",
                    fix="ask again when that replay has begun",
                    code=409,
                )
            return wanted

        await self._change(name, change)

    async def store_sequence(self, name: str, job: str, sequence: int) -> None:
        """Write where the job is, if the record is still that of the job."""

        def change(found_record: WaitingReplay | None) -> WaitingReplay | None:
            return (
                replace(found_record, sequence=sequence)
                if found_record is not None and found_record.job == job
                else found_record
            )

        await self._change(name, change)

    async def adopt(self, name: str, found: WaitingReplay) -> None:
        """Write a record for a job that waits on the queue, unless another job has one.

        The record can be missing because a delivery of a version without these records stored the job. It has no
        sequence if delivery ended between storing the job and writing where it is.
        """

        def change(found_record: WaitingReplay | None) -> WaitingReplay | None:
            if found_record is None or found_record.incarnation != found.incarnation:
                return found
            return replace(found_record, sequence=found.sequence) if found_record.job == found.job else found_record

        await self._change(name, change)

    async def forget(self, name: str, job: str) -> None:
        """Delete the record, if it is that of the job."""
        await self._change(
            name, lambda found_record: None if found_record is not None and found_record.job == job else found_record
        )

    async def remove(self, name: str, incarnation: str | None) -> None:
        """Delete the record of a subscription that ends, also one that is not understood."""
        entry = await self._bucket.newest(_key(name))
        if entry is None or entry.deleted:
            return
        if incarnation is None or _incarnation(entry.value) in (None, incarnation):
            await self._bucket.delete(_key(name), revision=entry.revision)

    async def _read(self, name: str) -> tuple[WaitingReplay | None, int]:
        """Return the record and the revision of its key."""
        entry = await self._bucket.newest(_key(name))
        if entry is None or entry.deleted:
            return None, 0 if entry is None else entry.revision
        return WAITING_REPLAY.read(entry.value, WaitingReplay.from_json, f"subscription {name!r}"), entry.revision

    async def _change(self, name: str, change: _Change) -> None:
        for _ in range(_ATTEMPTS):
            found_record, revision = await self._read(name)
            wanted = change(found_record)
            if wanted == found_record:
                return
            try:
                if wanted is None:
                    await self._bucket.delete(_key(name), revision=revision)
                else:
                    await self._bucket.update(_key(name), WAITING_REPLAY.dump(wanted.to_json()), revision)
            except WrongRevision:
                continue
            return
        raise Unavailable(f"others change the waiting replay of subscription {name!r} all the time", fix="try again")


def _key(name: str) -> str:
    return f"{check_subscription_name(name)}.replay"


def _incarnation(value: bytes) -> str | None:
    """Return which subscription a record belongs to; None if that cannot be read."""
    try:
        found = json_fields.parse(value, WAITING_REPLAY.what).get("incarnation")
    except InvalidInput:
        return None
    return found if isinstance(found, str) else None
