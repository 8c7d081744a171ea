"""`append_once`: rows into many subjects, in order, each exactly once, whoever else tries the same.

The one primitive by which the pipeline writes: a batch that is repeated after a crash, a second writer, a zombie that
comes back late, none of them stores a row twice or leaves one out. No time window is involved: what was written is read
from the target itself, by the position that each message carries in a header.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

import pyarrow as pa

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.append.encoded_table import Sheet, sheet
from purveyor.jetstream.bulk.append.position_scan import last_position
from purveyor.jetstream.bulk.append.replies import newest
from purveyor.jetstream.bulk.append.target_state import Course, course
from purveyor.jetstream.bulk.append.types import AppendOptions, Outcome, Target
from purveyor.jetstream.bulk.append.writer import Appender
from purveyor.jetstream.bulk.net.api_request import ask
from purveyor.jetstream.headers import POSITION
from purveyor.model.errors import InvalidInput, UnknownMessage

_DEFAULTS: Final = AppendOptions()


def append_once(
    address: Address, work: Iterable[tuple[Target, pa.Table | pa.RecordBatch]], options: AppendOptions = _DEFAULTS
) -> list[Outcome]:
    """Write the rows of each target behind what it holds, and tell for each target what became of them, in order given.

    Columns: `position` (int64, ascending, from 1 on), `data` (binary), optionally `headers` (map<string, list<string>>)
    and `msg_id` (string, null allowed). Headers that begin with `Nats-` are not sent along, except the message id.

    A row whose position is at or below that of the newest message on the subject, or at or below a floor, is skipped.
    The others are stored on condition that nobody else writes in between: one by one in a chain, where that is fast and
    each row has a message id, else in atomic batches. The same table may be given for many targets, and is then
    prepared once. A lost connection is made again within the patience. A target that refuses a row ends there, with all
    rows before it written, and does not stop the others.

    Message ids should be given and repeat with the row: they stop a writer that was held up for seconds between asking
    and writing, on a queue whose messages are deleted when they are acknowledged.

    Fails with `InvalidInput` (nothing was sent), `AuthenticationFailed`, or `ServerUnavailable` (away for longer than
    the patience); calling again with the same rows goes on where it ended.

    >>> append_once(address, [(Target(subject="ox.main", stream="stream:ox"), rows)])  # doctest: +SKIP
    [Outcome(target=..., stored=1000, skipped=0, last_position=1000, refused=None)]
    """
    given = list(work)
    streams = Counter(target.stream for target, _ in given)
    sheets: dict[tuple[int, str], Sheet] = {}
    courses: list[Course] = []
    for target, rows in given:
        key = id(rows), target.position_header
        if key not in sheets:
            sheets[key] = sheet(target.subject, rows, target.position_header)
        sheets[key].users += 1
        # Two chains in one stream would break each other all the time.
        courses.append(course(target, sheets[key], options, chains=streams[target.stream] == 1))
    subjects = {each.target.subject for each in courses}
    if len(subjects) < len(courses):
        raise InvalidInput("two targets have the same subject", fix="give all rows of a subject at once")
    Appender(address, [each for each in courses if len(each.positions)], options).run()
    return [each.outcome for each in courses]


def newest_position(address: Address, stream: str, subject: str, header: str = POSITION) -> int | None:
    """The position of the newest message on a subject that carries one; None if there is none.

    Fails with `UnknownStream`, `PermissionDenied`, or `Unavailable`.
    """
    target = Target(subject=subject, stream=stream, position_header=header)
    try:
        answer = ask(address, f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
    except UnknownMessage:
        return None
    found = newest(answer["message"], header)
    if found.position is not None:
        return found.position
    return last_position(address, target, found.sequence, _DEFAULTS.patience_seconds)
