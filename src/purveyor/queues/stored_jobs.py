"""Jobs of subscriptions on the queue `prefill`, each stored once: keys `<name>.prefill-job` and `<name>.catch-up-job`.

The server recognises the id of a job for two minutes only, and a request for the same job can come later than that:
while the prefill worker is busy or away, people ask again. A second copy of a job is not harmless: when a worker reads
it, the run of the first copy loses its claim, and the work begins again.

1. The program reads the record. If it names this job, and the queue still holds the message, there is nothing to do.
2. It stores the job on the queue.
3. It writes the record with the sequence of the message. After a crash before this, a request that comes later than the
   server remembers the id stores a second copy, once.

`STREAM.INFO` says whether the queue holds a message, so no permission to read the queue is needed.
"""

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from purveyor.jetstream.headers import HeadersIn
from purveyor.jetstream.key_value import Bucket
from purveyor.jetstream.publisher import Expect
from purveyor.model.control_events import JOB_SUBJECT, Job, JobKind
from purveyor.model.errors import UnknownStream, WrongRevision
from purveyor.model.json_fields import Json, Kind, field_names, read_fields, text_field, whole_field, write_fields
from purveyor.model.name_rules import check_subscription_name
from purveyor.queues.catalogue import PREFILL

if TYPE_CHECKING:
    from purveyor.jetstream.client import JetStream

_FIELDS: Final = (text_field("incarnation"), text_field("job"), whole_field("sequence"))
STORED_JOB: Final = Kind("stored job", field_names(_FIELDS))
_KINDS: Final = (JobKind.PREFILL, JobKind.CATCH_UP)
"""A replay has another record, because at most one may wait (`waiting_replays`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """The newest job of one kind, and its sequence in the queue `prefill`."""

    incarnation: str
    job: str
    sequence: int

    def to_json(self) -> Json:
        """Return the fields of the record."""
        return write_fields(_FIELDS, self)

    @classmethod
    def from_json(cls, data: object) -> "StoredJob":
        """Build it from checked fields; InvalidInput names the wrong one."""
        return cls(**read_fields(_FIELDS, STORED_JOB.check(data), STORED_JOB.what))


class StoredJobs:
    """The records of all subscriptions. The queue `prefill` must exist.

    A record that this program does not understand is an UnreadableRecord, and stays as it is.
    """

    def __init__(self, jetstream: "JetStream", bucket: Bucket) -> None:
        self._jetstream = jetstream
        self._bucket = bucket

    async def put_once(self, job: Job, headers: HeadersIn | None = None) -> int:
        """Store a job, unless the queue holds it; return its sequence."""
        key = _key(job.name, job.kind)
        entry = await self._bucket.newest(key)
        if entry is not None and not entry.deleted:
            found = STORED_JOB.read(entry.value, StoredJob.from_json, f"subscription {job.name!r}")
            if (found.incarnation, found.job) == (job.incarnation, job.job) and await self._is_stored(found.sequence):
                return found.sequence
        receipt = await self._jetstream.publish(
            JOB_SUBJECT, job.encode(), headers=headers, msg_id=job.job, expect=Expect(stream=PREFILL.stream)
        )
        stored = StoredJob(incarnation=job.incarnation, job=job.job, sequence=receipt.sequence)
        with contextlib.suppress(WrongRevision):  # another program stored a job of this subscription at the same time
            value = STORED_JOB.dump(stored.to_json())
            await self._bucket.update(key, value, 0 if entry is None else entry.revision)
        return receipt.sequence

    async def remove(self, name: str) -> None:
        """Delete the records of a subscription that ends, also those that are not understood."""
        for kind in _KINDS:
            entry = await self._bucket.newest(_key(name, kind))
            if entry is not None and not entry.deleted:
                with contextlib.suppress(WrongRevision):  # a job of another incarnation is stored
                    await self._bucket.delete(_key(name, kind), revision=entry.revision)

    async def _is_stored(self, sequence: int) -> bool:
        with contextlib.suppress(UnknownStream):
            return await self._jetstream.streams.holds(PREFILL.stream, sequence)
        return False


def _key(name: str, kind: JobKind) -> str:
    return f"{check_subscription_name(name)}.{kind.value}-job"
