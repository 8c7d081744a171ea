"""The replay of a subscription that has not begun, at most one: key `<name>.replay` of the registry's bucket.

It has a key of its own, because the prefill state belongs to the job that fills the queue: any other write to that
state ends the job. Delivery writes the record before it stores the job on the queue `prefill`. The prefill worker
deletes the record when it begins the job or gives it up. The job itself is only on the queue: the record decides
whether delivery accepts another replay, and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from purveyor.jetstream.key_value import Bucket
from purveyor.model import json_fields
from purveyor.model.errors import AlreadyExists, InvalidInput, Unavailable, WrongRevision
from purveyor.model.json_fields import Json
from purveyor.model.name_rules import check_subscription_name
from purveyor.model.stored_record import Kind

WAITING_REPLAY: Final = Kind("waiting replay", ("incarnation", "job", "at", "sequence"))

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
        return {
            "incarnation": self.incarnation,
            "job": self.job,
            "at": self.at.isoformat(),
            "sequence": self.sequence,
        }

    @classmethod
    def from_json(cls, data: object) -> "WaitingReplay":
        """Checked; InvalidInput names the field that is wrong."""
        given = WAITING_REPLAY.check(data)
        return cls(
            incarnation=json_fields.text(given, "incarnation", WAITING_REPLAY.what),
            job=json_fields.text(given, "job", WAITING_REPLAY.what),
            at=json_fields.moment(given, "at", WAITING_REPLAY.what),
            sequence=None
            if given.get("sequence") is None
            else json_fields.whole(given, "sequence", WAITING_REPLAY.what),
        )

    def waits(self, now: datetime, *, first_sequence: int, begun: str | None) -> bool:
        """Whether the job can still be on the queue `prefill` and has not begun. Pure.

        `first_sequence` is that of the queue, `begun` the job that the prefill state names. They matter where the
        record was not deleted: the queue was purged, or a worker of a version without these records ran the job.

        >>> noted = WaitingReplay(incarnation="i", job="j", at=datetime(2026, 1, 1, tzinfo=UTC), sequence=7)
        >>> [noted.waits(noted.at, first_sequence=first, begun=None) for first in (7, 8)]
        [True, False]
        >>> noted.waits(noted.at, first_sequence=7, begun="j")
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
        """Write that a replay waits; AlreadyExists names the one that waits already. See `WaitingReplay.waits`."""

        def change(noted: WaitingReplay | None) -> WaitingReplay:
            if (
                noted is not None
                and noted.incarnation == wanted.incarnation
                and noted.waits(datetime.now(UTC), first_sequence=first_sequence, begun=begun)
            ):
                raise AlreadyExists(
                    f"a replay of subscription {name!r} waits already, job {noted.job}",
                    fix="ask again when that replay has begun",
                    code=409,
                )
            return wanted

        await self._change(name, change)

    async def stored(self, name: str, job: str, sequence: int) -> None:
        """Write where the job is, if the record is still that of the job."""

        def change(noted: WaitingReplay | None) -> WaitingReplay | None:
            return replace(noted, sequence=sequence) if noted is not None and noted.job == job else noted

        await self._change(name, change)

    async def adopt(self, name: str, found: WaitingReplay) -> None:
        """Write a record for a job that waits on the queue, unless another job has one.

        The record can be missing because a delivery of a version without these records stored the job. It has no
        sequence if delivery ended between storing the job and writing where it is.
        """

        def change(noted: WaitingReplay | None) -> WaitingReplay | None:
            if noted is None or noted.incarnation != found.incarnation:
                return found
            return replace(noted, sequence=found.sequence) if noted.job == found.job else noted

        await self._change(name, change)

    async def forget(self, name: str, job: str) -> None:
        """Delete the record, if it is that of the job."""
        await self._change(name, lambda noted: None if noted is not None and noted.job == job else noted)

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
            noted, revision = await self._read(name)
            wanted = change(noted)
            if wanted == noted:
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
