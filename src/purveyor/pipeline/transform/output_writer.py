"""Writes the outputs of the transform into the queues `incoming` and `dead-letters`: in order, exactly once.

`incoming` is an interest queue: a message that every reader has passed is gone. So the newest event of the transform
could be gone as well, and nothing would show how far it has written. Therefore the durable `transform-receipts` on
`incoming.ldif` keeps the newest event: it is moved up to it, never past it. Each event carries its position (see
`record_transform`) in a header, so the newest one is the watermark, without a time window. A batch is written like
this:

1. Spark computes the outputs and stores the new state of the directories under the number of the batch.
2. One task sorts them by position and gives them to `append_once`: it asks for the newest event on the subject, skips
   what is at or below its position, and stores the rest in atomic batches, which the server refuses if another writer
   wrote in between. Dead letters go the same way; their queue keeps everything.
3. The receipts are moved up to the newest event: all before it may go.
4. Spark commits the batch, and later moves the durable `transformer` of the queue `ldif`.

A crash between 1 and 2, or within 2: the batch runs again from the state of the batch before it, gives the same outputs
at the same positions, and 2 goes on behind the newest event, which is still there. Between 2 and 3: the batch runs
again, 2 skips all of it, 3 happens. Between 3 and 4: the same. The receipts were not moved past the newest event, so
the watermark is there, however long the pause was and whichever readers have read the events. After 4: `ldif` may hold
messages that are done; the checkpoint has that. A second writer that was believed dead finds its rows below the
watermark or its batch refused.

Only an operator who deletes the newest message of a subject removes the watermark; a batch that runs again just then
would write its dead letters (or events) a second time, unless the deduplication window catches them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.append.append_once import append_once, newest_position
from purveyor.jetstream.bulk.net.pool import RetryDeadline, connect, release, request_api
from purveyor.jetstream.bulk.options import AppendOptions, Target
from purveyor.jetstream.config import to_wire
from purveyor.model.errors import InvalidConfig, PublishRefused, UnknownConsumer, UnknownMessage
from purveyor.model.event import LDIF_SUBJECT
from purveyor.model.metrics import MIGRATION_WAITS
from purveyor.pipeline.transform.record_transform import ORIGIN, POSITION_BITS
from purveyor.pipeline.transform.state_processor import OUTPUT_SCHEMA, read_chunk
from purveyor.queues.catalogue import DEAD_LETTERS, RECEIPTS, incoming

ORIGIN_POSITION: Final = "Purveyor-Origin-Position"
EVENT_TARGET: Final = Target(subject=LDIF_SUBJECT, stream=incoming().stream, position_header=ORIGIN_POSITION)
DEAD_LETTER_TARGET: Final = Target(
    subject=f"dead-letters.{ORIGIN}", stream=DEAD_LETTERS.stream, position_header=ORIGIN_POSITION
)
RESULT: Final = "events bigint, letters bigint, waits string"
_RESULT_SCHEMA: Final = pa.schema([("events", pa.int64()), ("letters", pa.int64()), ("waits", pa.string())])


@dataclass(frozen=True, slots=True)
class OutputWriter:
    """Writes the outputs of one batch. Spark sends it to the executor that runs the one task."""

    address: Address
    options: AppendOptions

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the outputs of a batch, chunks in any order; yield how many events and letters were stored."""
        chunks = [chunk for batch in batches for chunk in batch.column("chunk").to_pylist()]
        table = pa.concat_tables([OUTPUT_SCHEMA.empty_table(), *map(read_chunk, chunks)]).sort_by("position")
        work = [(EVENT_TARGET, _rows(table, parked=False)), (DEAD_LETTER_TARGET, _rows(table, parked=True))]
        stored = [0, 0]
        for number, (target, rows) in enumerate(work):
            if rows.num_rows:
                self._check_order(target, rows)
                (outcome,) = append_once(self.address, [(target, rows)], self.options)
                if outcome.refused is not None:
                    raise PublishRefused(
                        f"{target.stream} refused position {outcome.refused.position} of the transform: "
                        f"{outcome.refused.reason}",
                        fix="the transform tries the batch again from there: see the server's answer",
                        err_code=outcome.refused.code,
                    )
                stored[number] = outcome.stored
        yield pa.record_batch([[stored[0]], [stored[1]], [MIGRATION_WAITS.take_finished()]], schema=_RESULT_SCHEMA)

    def _check_order(self, target: Target, rows: pa.Table) -> None:
        """Raise InvalidConfig if the queue has newer outputs: they come from another checkpoint or another stream."""
        newest = newest_position(self.address, target.stream, target.subject, target.position_header)
        last = int(rows.column("position")[-1].as_py())
        if newest is not None and newest > last:
            raise InvalidConfig(
                f"{target.subject} was written up to message {newest >> POSITION_BITS} of stream:ldif, and this "
                f"checkpoint is at {last >> POSITION_BITS}",
                fix="go on with the checkpoint that wrote it; a new stream:ldif must begin behind it "
                f"(first_seq {(newest >> POSITION_BITS) + 1})",
            )


def _rows(table: pa.Table, *, parked: bool) -> pa.Table:
    mask = table.column("parked")
    return table.filter(mask if parked else pc.invert(mask)).drop_columns(["parked"])


def create_receipts(address: Address) -> None:
    """Create the durable of the receipts if it does not exist, before the first event is written.

    A sealed queue takes no event; the one that follows it is created with all its durables.
    """
    queue = incoming()
    if request_api(address, f"STREAM.INFO.{queue.stream}")["config"].get("sealed"):
        return
    try:
        request_api(address, f"CONSUMER.INFO.{queue.stream}.{RECEIPTS}")
    except UnknownConsumer:
        (reader,) = (each for each in queue.readers if each.durable == RECEIPTS)
        config = to_wire(reader.consumer())
        config.pop("backoff", None)
        body: dict[str, Any] = {"stream_name": queue.stream, "config": config, "action": ""}
        request_api(address, f"CONSUMER.CREATE.{queue.stream}.{RECEIPTS}", body)


def advance_receipts(address: Address) -> None:
    """Release all events but the newest. Repeated calls do nothing."""
    stream = EVENT_TARGET.stream
    try:
        newest = int(
            request_api(address, f"STREAM.MSG.GET.{stream}", {"last_by_subj": EVENT_TARGET.subject})["message"]["seq"]
        )
    except UnknownMessage:
        return
    floor = int(request_api(address, f"CONSUMER.INFO.{stream}.{RECEIPTS}")["ack_floor"]["stream_seq"])
    if floor < newest - 1:
        request_api(address, f"CONSUMER.RESET.{stream}.{RECEIPTS}", {"seq": newest})


def max_payload(address: Address) -> int:
    """Return the size of the largest message that the server takes."""
    link = connect(address, RetryDeadline(60.0))
    release(address, link)
    return link.info.max_payload
