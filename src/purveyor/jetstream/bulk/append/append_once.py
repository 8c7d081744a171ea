"""`append_once`: write rows to many subjects, in order, each exactly once, even with concurrent writers.

The pipeline writes with this function. A batch repeated after a crash, a second writer, or an old writer that resumes
late neither stores a row twice nor skips one. This does not depend on a time window: the writer reads from the target
itself what was written, by the position that each message carries in a header.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

import pyarrow as pa

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.append.encoded_table import EncodedTable, encode_table
from purveyor.jetstream.bulk.append.target_state import TargetState
from purveyor.jetstream.bulk.append.writer import Appender
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.jetstream.bulk.options import AppendOptions, Outcome, Target
from purveyor.jetstream.bulk.replies import find_last_position, parse_newest
from purveyor.jetstream.headers import POSITION
from purveyor.model.errors import InvalidInput, UnknownMessage

_DEFAULTS: Final = AppendOptions()


def append_once(
    address: Address, work: Iterable[tuple[Target, pa.Table | pa.RecordBatch]], options: AppendOptions = _DEFAULTS
) -> list[Outcome]:
    """Append the rows of each target to its subject; return one outcome per target, in the given order.

    Columns: `position` (int64, ascending, from 1 on), `data` (binary), optionally `headers` (map<string, list<string>>)
    and `msg_id` (string, null allowed). Headers that begin with `Nats-` are not copied, except the message id.

    A row is skipped if its position is at or below the position of the newest message on the subject, or at or below a
    floor. The other rows are stored on condition that no other writer writes in between: one by one in a chain, where
    that is fast and each row has a message id, else in atomic batches. A table that is given for many targets is
    encoded once. The function reconnects for up to `patience_seconds`. A target that refuses a row ends there, with all
    rows before it written; the other targets continue.

    Give message ids that repeat with the row: they stop a writer that was suspended for seconds between its read and
    its write, on a queue whose messages are deleted when they are acknowledged.

    Raise `InvalidInput` (nothing was sent), `AuthenticationFailed`, or `ServerUnavailable` (for longer than
    `patience_seconds`). A call with the same rows continues where this one ended.

    >>> append_once(address, [(Target(subject="ox.main", stream="stream:ox"), rows)])  # doctest: +SKIP
    [Outcome(target=..., stored=1000, skipped=0, last_position=1000, refused=None)]
    """
    given = list(work)
    streams = Counter(target.stream for target, _ in given)
    tables: dict[tuple[int, str], EncodedTable] = {}
    states: list[TargetState] = []
    for target, rows in given:
        key = id(rows), target.position_header
        if key not in tables:
            tables[key] = encode_table(target.subject, rows, target.position_header)
        tables[key].target_count += 1
        # Two chains in one stream would break each other.
        states.append(TargetState(target, tables[key], options.batch_rows, may_chain=streams[target.stream] == 1))
    subjects = {each.target.subject for each in states}
    if len(subjects) < len(states):
        raise InvalidInput("two targets have the same subject", fix="give all rows of a subject at once")
    Appender(address, [each for each in states if len(each.positions)], options).run()
    return [each.outcome for each in states]


def newest_position(address: Address, stream: str, subject: str, header: str = POSITION) -> int | None:
    """Return the newest position on a subject; None if no message carries one.

    Raise `UnknownStream`, `PermissionDenied`, or `Unavailable`.
    """
    target = Target(subject=subject, stream=stream, position_header=header)
    try:
        reply = request_api(address, f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
    except UnknownMessage:
        return None
    found = parse_newest(reply["message"], header)
    if found.position is not None:
        return found.position
    return find_last_position(address, target, found.sequence, _DEFAULTS.patience_seconds)
