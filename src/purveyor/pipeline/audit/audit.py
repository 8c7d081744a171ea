"""The audit: every event of a range that a subscription gets is acknowledged, queued, or parked; and nothing else is.

A subscription gets at each position what it selected there (see `selections`), not what it selects today.

The comparison is one join in Spark SQL, by subscription and position: what the archive expects against what the queues
hold. Executors read the queues, a queue at a time.

For messages that left a queue only sequences are known: the delivery state has which are acknowledged, in any order. A
position that left the queue was between its neighbours that are still there; as many positions as there are
acknowledged sequences between those two were delivered, and the other expected ones are missing.

A dead letter that was redriven or discarded has left a receipt. A redriven one is in the queue again, on another
subject; a discarded one stays accounted for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as f

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import ReadOptions, read_range
from purveyor.jetstream.headers import POSITION
from purveyor.model.ack_ranges import AckRanges
from purveyor.model.delivery_state import AckSummary
from purveyor.model.errors import InvalidConfig, UnknownStream
from purveyor.model.message_headers import ORIGINAL_KIND, PARKED_POSITION
from purveyor.pipeline.archive.reader import ArchiveSource, events
from purveyor.pipeline.audit.report import Account, Difference, Findings, Location, Report
from purveyor.pipeline.audit.scope import (
    ControlEventAt,
    Scope,
    acknowledged,
    count_dead_letters,
    dispatched_until,
    find_scopes,
    read_control_events,
    selection_ranges,
)
from purveyor.pipeline.job_failures import PARKED_ORIGIN
from purveyor.pipeline.matching import Matcher
from purveyor.queues.catalogue import DEAD_LETTERS, subscription_queue
from purveyor.queues.dead_letters.letter import subject_token, subscription_origin
from purveyor.queues.dead_letters.store import LETTER_SUBJECTS, RECEIPT_PREFIX, RESOLUTION_HEADER
from purveyor.spark.pyspark_internals import map_in_arrow

_MAX_LISTED_DIFFERENCES: Final = 20
_LAST_SEQUENCE: Final = 2**62
_ALL_SUBSCRIPTIONS: Final = ""
"""The subscription of a reading that is about all of them."""
_ORIGINAL: Final = "Purveyor-Original-"
_HEADERS: Final = "map<string,array<string>>"
_KEY: Final = ["subscription", "position"]
_LIMITS: Final = (
    "subscription string, begin long, reached long, dispatched long, acknowledged long, "
    "done array<struct<begin: long, end: long>>, retry_done array<struct<begin: long, end: long>>, retry_to long, "
    "expired long"
)
_NEVER_THERE: Final = "none"


def audit(
    spark: SparkSession,
    archive: ArchiveSource,
    first: int,
    last: int,
    subscriptions: Sequence[str] | None = None,
) -> Report:
    """Compare the positions `first` to `last`, both included, for the named subscriptions or for all.

    Positions that the dispatcher has not reached are `pending`, not missing. Raise UnknownSubscription for an unknown
    name. The report names subscriptions that this program does not understand, and is not clean then.
    """
    address = archive.address
    if address is None:
        raise InvalidConfig("an audit compares the archive with queues, and no server is set", fix="set one")
    chosen, unreadable = find_scopes(address, dispatched_until(address, archive.stream), subscriptions)
    if not chosen:
        return Report(first=first, last=last, unreadable=unreadable)
    held = _read_queues(spark, address, chosen).persist()
    try:
        held.count()  # read the queues now, before the acknowledgements
        acked, not_known = acknowledged(address)
        unreadable |= {each.name: not_known[each.name] for each in chosen if each.name in not_known}
        chosen = [each for each in chosen if each.name not in not_known]
        if not chosen:
            return Report(first=first, last=last, unreadable=unreadable)
        compared = _compare(archive, (first, last), chosen, held, acked).persist()
        try:
            accounts = _accounts(compared, chosen, (first, last))
            return Report(first=first, last=last, accounts=accounts, unreadable=unreadable)
        finally:
            compared.unpersist()
    finally:
        held.unpersist()


@dataclass(frozen=True, slots=True)
class _Reading:
    """A stream to read, for one subscription."""

    subscription: str
    what: str
    stream: str
    subject: str


def _read_queues(spark: SparkSession, address: Address, chosen: Sequence[Scope]) -> DataFrame:
    """Read the queues and the dead letters: subscription, what, sequence, position, never_there.

    `what` is `main` for a message of the queue, `retry` for a letter that was redriven, `dead` for a letter, and
    `retried` or `discarded` for the receipt of one. `never_there` marks letters about messages that never were in the
    queue, because they were too large or because dispatch fails on them. A row about a prefilled or replayed message
    does not count for the live one.
    """
    parked = count_dead_letters(address, DEAD_LETTERS.stream, LETTER_SUBJECTS)
    settled = {
        subject.rpartition(".")[0]
        for subject in count_dead_letters(address, DEAD_LETTERS.stream, f"{RECEIPT_PREFIX}.>")
    }
    readings = [
        _Reading(each.name, kind, subscription_queue(each.name).stream, f"{each.name}.{kind}")
        for each in chosen
        for kind in ("main", "retry")
    ]
    for each in chosen:
        for word in (subject_token(each.name), subject_token(subscription_origin(each.name))):
            if f"dead-letters.{word}" in parked:
                readings.append(_Reading(each.name, "dead", DEAD_LETTERS.stream, f"dead-letters.{word}"))
            if f"{RECEIPT_PREFIX}.{word}" in settled:
                readings.append(_Reading(each.name, "settled", DEAD_LETTERS.stream, f"{RECEIPT_PREFIX}.{word}.*"))
    for_all = subject_token(PARKED_ORIGIN)
    if f"dead-letters.{for_all}" in parked:
        readings.append(_Reading(_ALL_SUBSCRIPTIONS, "dead", DEAD_LETTERS.stream, f"dead-letters.{for_all}"))
    if f"{RECEIPT_PREFIX}.{for_all}" in settled:
        readings.append(_Reading(_ALL_SUBSCRIPTIONS, "settled", DEAD_LETTERS.stream, f"{RECEIPT_PREFIX}.{for_all}.*"))
    rows = [(each.subscription, each.what, each.stream, each.subject) for each in readings]
    todo = spark.createDataFrame(rows, "subscription string, what string, stream string, subject string")
    schema = f"subscription string, what string, sequence long, headers {_HEADERS}"
    spread = todo.repartition(min(len(rows), spark.sparkContext.defaultParallelism))
    read = map_in_arrow(spread, _reader(address), schema)
    return _for_each(read, [each.name for each in chosen]).select("subscription", *_interpret(), "sequence")


def _for_each(read: DataFrame, names: Sequence[str]) -> DataFrame:
    """Repeat a letter about an event that dispatch fails on for each subscription."""
    about_all = f.col("subscription") == _ALL_SUBSCRIPTIONS
    wanted = (
        ~about_all | f.col("headers")[PARKED_POSITION].isNotNull()
    )  # the others are about messages that are not events
    whose = f.when(about_all, f.lit(list(names))).otherwise(f.array("subscription"))
    return read.where(wanted).withColumn("subscription", f.explode(whose))


def _interpret() -> tuple[Column, ...]:
    """Return the columns that the headers of a row give; null for rows of another origin, or about a copy."""
    name, header, place = f.col("subscription"), f.col("headers"), f.col("what")
    origin, came_on = header["Purveyor-Origin"][0], header["Purveyor-Subject"][0]
    rejected = origin == f.concat(f.lit(subscription_origin("")), name)
    in_queue = place.isin("main", "retry")
    stated = f.coalesce(header[PARKED_POSITION][0], header[POSITION][0])
    given = f.when(in_queue | ~rejected, stated).otherwise(header[f"{_ORIGINAL}{POSITION}"][0])
    lay = (
        f.when(place == "retry", header[ORIGINAL_KIND][0])
        .when(in_queue, "main")
        .when(came_on == f.concat(name, f.lit(".prefill")), "prefill")
        .when(rejected, f.coalesce(header[f"{_ORIGINAL}{ORIGINAL_KIND}"][0], f.lit("main")))
        .when((origin == name) | (origin == PARKED_ORIGIN), _NEVER_THERE)
    )
    what = f.when(place == "settled", header[RESOLUTION_HEADER][0]).otherwise(place)
    return (
        f.when(lay.isin("main", _NEVER_THERE), what).alias("what"),
        given.try_cast("long").alias("position"),
        (lay == _NEVER_THERE).alias("never_there"),
    )


def _reader(address: Address) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                options = ReadOptions(subjects=(row["subject"],), columns=("sequence", "headers"))
                try:
                    for found in read_range(address, row["stream"], 1, _LAST_SEQUENCE, options):
                        yield _labelled(found, row)
                except UnknownStream:
                    continue  # everything that should be in it is missing

    return read


def _labelled(found: Any, row: dict[str, str]) -> Any:
    count = found.num_rows
    return pa.record_batch(
        {
            "subscription": pa.repeat(pa.scalar(row["subscription"], pa.string()), count),
            "what": pa.repeat(pa.scalar(row["what"], pa.string()), count),
            "sequence": found.column("sequence"),
            "headers": found.column("headers"),
        }
    )


def _compare(
    archive: ArchiveSource,
    range_: tuple[int, int],
    chosen: Sequence[Scope],
    held: DataFrame,
    acked: Mapping[tuple[str, str], AckSummary],
) -> DataFrame:
    """Return one row per subscription and position: whether it is expected, how often it is queued, and its state."""
    spark = held.sparkSession
    limits = spark.createDataFrame(
        [_limits(each, acked.get((each.name, each.registered.incarnation))) for each in chosen], _LIMITS
    )
    happened = events(spark, archive, *range_).where(f.col("kind") == "event")
    # Also behind the range: a later change may void one in it, and the registry keeps only the last changes.
    log = read_control_events(spark, archive, min(each.begin for each in chosen), _LAST_SEQUENCE)
    wanted = _expected(happened, chosen, log)
    found = wanted.join(_queued(held), _KEY, "full").join(_letters_by_position(held, limits), _KEY, "left")
    newest = _queued(held).groupBy("subscription").agg(f.max("position").alias("newest"))
    limits = limits.join(f.broadcast(newest), "subscription", "left").withColumn(
        "reached",
        f.greatest("reached", f.least("dispatched", f.greatest("newest", "acknowledged"))),
    )
    return (
        _gone(found.join(f.broadcast(limits), "subscription"))
        .withColumn("state", _state(range_))
        .select(
            *("subscription", "position", "sequence", "state", "copies", "disordered", "expected", "rejected"),
            *("never_there", "waiting", "retry_to", "expired"),
        )
    )


def _expected(happened: DataFrame, chosen: Sequence[Scope], log: Sequence[ControlEventAt]) -> DataFrame:
    """Return the subscription and position of each event that a subscription gets, by what it selected there."""
    ranges = [
        (each.name, selected)
        for each in chosen
        for selected in selection_ranges(each.registered.record, log, each.dispatched)
    ]
    rows = [(number, name, each.after, each.until) for number, (name, each) in enumerate(ranges)]
    table = happened.sparkSession.createDataFrame(rows, "_target int, subscription string, after long, until long")
    return (
        Matcher([each.definition for _, each in ranges])
        .add_targets(happened)
        .selectExpr("position", "explode(targets) as _target")
        .join(f.broadcast(table), "_target")
        .where((f.col("position") > f.col("after")) & (f.col("position") <= f.col("until")))
        .select(*_KEY, f.lit(True).alias("expected"))
    )


def _letters_by_position(held: DataFrame, limits: DataFrame) -> DataFrame:
    """Return for each position: whether a letter is parked, how the last one was settled, whether one was redriven."""
    never, what = f.col("never_there"), f.col("what")
    done = f.coalesce(f.expr("exists(retry_done, run -> sequence between run.begin and run.end)"), f.lit(False))
    settled = f.when(what.isin("retried", "discarded"), f.col("sequence"))
    return (
        held.where("what != 'main'")
        .join(f.broadcast(limits.select("subscription", "retry_done")), "subscription")
        .groupBy(*_KEY)
        .agg(
            f.max(what == "dead").alias("dead"),
            f.max((what == "dead") & ~never).alias("rejected"),
            (f.max_by(what, settled) == "discarded").alias("discarded"),
            f.max(settled.isNotNull() & never).alias("never_there"),
            f.max((what == "retry") & ~done).alias("waiting"),
        )
    )


def _limits(scope: Scope, acked: AckSummary | None) -> tuple[object, ...]:
    """Return a row of `_LIMITS`. Sequences that the queue never had are in no acknowledged range."""
    about = scope.name, scope.begin, scope.reached, scope.dispatched
    if acked is None:
        return *about, 0, None, None, 0, 0
    main = None if acked.main is None else _ranges(acked.main, scope.first_sequence)
    retry = _ranges(acked.retry, scope.first_sequence)
    return *about, acked.position, main, retry, acked.redriven_up_to, acked.expired.count


def _ranges(done: AckRanges, first: int) -> list[tuple[int, int]]:
    ranges = [(first, done.floor), *done.ranges]
    return [(max(begin, first), end) for begin, end in ranges if end >= first]


def _gone(found: DataFrame) -> DataFrame:
    """Add whether a message in the queue is acknowledged, and for one that left the queue, where it was.

    `place` is its number among all that left between the same two neighbours, and `room` the number of acknowledged
    sequences between those.
    """
    sequence = f.when(f.col("position").isNotNull(), f.col("sequence"))
    before = Window.partitionBy("subscription").orderBy("position").rowsBetween(Window.unboundedPreceding, -1)
    between = Window.partitionBy("subscription", "low")  # up to and including the next message that is there
    so_far = between.orderBy("position").rowsBetween(Window.unboundedPreceding, 0)
    in_queue = f.when(f.col("dead"), f.col("rejected")).otherwise(~f.coalesce("never_there", f.lit(False)))
    gone = f.col("expected") & f.col("copies").isNull() & in_queue
    length = "greatest(0L, least(run.end, high - 1) - greatest(run.begin, low + 1) + 1)"
    room = f"aggregate(done, 0L, (sum, run) -> sum + {length})"
    return (
        found.withColumn("low", f.coalesce(f.last(sequence, ignorenulls=True).over(before), f.lit(0)))
        .withColumn("high", f.coalesce(f.max(sequence).over(between), f.lit(_LAST_SEQUENCE)))
        .withColumn("place", f.count_if(gone).over(so_far))
        .withColumn("room", f.when(gone, f.expr(room)))
        .withColumn("done_itself", f.expr("exists(done, run -> sequence between run.begin and run.end)"))
    )


def _queued(held: DataFrame) -> DataFrame:
    before = Window.partitionBy("subscription").orderBy("sequence").rowsBetween(Window.unboundedPreceding, -1)
    return (
        held.where("what = 'main'")
        .withColumn("disordered", f.coalesce(f.col("position") < f.max("position").over(before), f.lit(False)))
        .groupBy("subscription", "position")
        .agg(
            f.min("sequence").alias("sequence"),
            f.count("*").alias("copies"),
            f.max("disordered").alias("disordered"),
        )
    )


def _state(range_: tuple[int, int]) -> Column:
    position = f.col("position")
    inside = position.isNull() | position.between(*range_)
    left = f.col("copies").isNull() | f.col("done_itself")
    return (
        f.when(f.col("expected").isNull() & inside, "unexpected")
        .when(f.col("expected").isNull(), "outside")
        .when(f.col("dead") & left, "dead")
        .when(f.col("waiting") & left, "queued")
        .when(f.col("discarded") & left, "discarded")
        .when(f.col("done_itself") | (f.col("never_there") & left), "delivered")
        .when(f.col("copies") > 0, "queued")
        .when(
            (position <= f.col("acknowledged")) & (f.col("done").isNull() | (f.col("place") <= f.col("room"))),
            "delivered",
        )
        .when(position <= f.col("reached"), "missing")
        .otherwise("pending")
    )


_DIFFERS: Final = {
    Difference.MISSING: "state = 'missing'",
    Difference.DOUBLED: "copies > 1 and position is not null and state != 'outside'",
    Difference.UNEXPECTED: "state = 'unexpected'",
    Difference.DISORDERED: "disordered and state != 'outside'",
}


def _accounts(compared: DataFrame, chosen: Sequence[Scope], range_: tuple[int, int]) -> tuple[Account, ...]:
    states = ("queued", "dead", "discarded", "delivered", "pending")
    counted = [f.count_if(f.col("state") == state).alias(state) for state in states]
    differ = [f.count_if(f.expr(rule)).alias(kind.name) for kind, rule in _DIFFERS.items()]
    totals = {
        row.subscription: row
        for row in compared.groupBy("subscription")
        .agg(
            f.count_if(f.col("expected")).alias("expected"),
            f.coalesce(f.sum("copies"), f.lit(0)).alias("copies"),
            f.count_if(
                f.expr(
                    "copies is null and not coalesce(never_there, false) "
                    "and (rejected or state in ('delivered', 'discarded', 'missing'))"
                )
            ).alias("gone"),
            f.max(f.greatest("retry_to", f.col("waiting").cast("long"))).alias("retried"),
            f.max("expired").alias("expired"),
            *counted,
            *differ,
        )
        .collect()
    }
    listed = _listed(compared) if any(row[kind.name] for row in totals.values() for kind in _DIFFERS) else {}
    return tuple(_account(each, totals.get(each.name), listed, range_) for each in chosen)


def _listed(compared: DataFrame) -> dict[tuple[str, str], tuple[Location, ...]]:
    """Return the first differences of each subscription and kind."""
    kinds = f.array(*(f.when(f.expr(rule), f.lit(kind.name)) for kind, rule in _DIFFERS.items()))
    rows = compared.select("subscription", "position", "sequence", f.explode(kinds).alias("kind")).where(
        "kind is not null"
    )
    order = Window.partitionBy("subscription", "kind").orderBy("position", "sequence")
    found: dict[tuple[str, str], tuple[Location, ...]] = {}
    numbered = rows.withColumn("number", f.row_number().over(order)).where(f.col("number") <= _MAX_LISTED_DIFFERENCES)
    for row in numbered.orderBy("subscription", "kind", "number").collect():
        key = (row.subscription, row.kind)
        found[key] = (*found.get(key, ()), Location(row.position, row.sequence))
    return found


def _account(
    scope: Scope, row: Row | None, listed: dict[tuple[str, str], tuple[Location, ...]], range_: tuple[int, int]
) -> Account:
    suspended = scope.registered.suspended
    about = Account(
        subscription=scope.name,
        begin=scope.begin,
        reached=scope.reached,
        suspended=suspended.reason if suspended is not None else None,
    )
    if row is None:
        return about
    return Account(
        subscription=scope.name,
        begin=scope.begin,
        reached=scope.reached,
        suspended=about.suspended,
        expected=row.expected,
        delivered=row.delivered,
        queued=row.queued,
        dead_lettered=row.dead,
        discarded=row.discarded,
        expired=row.expired,
        pending=row.pending,
        written_twice=_written_twice(scope, row, range_),
        differences={
            kind: Findings(row[kind.name], listed.get((scope.name, kind.name), ()))
            for kind in _DIFFERS
            if row[kind.name]
        },
    )


def _written_twice(scope: Scope, row: Row, range_: tuple[int, int]) -> int | None:
    """Return how many messages the queue took beyond those accounted for: duplicates that were acknowledged, too.

    Known only if nothing but live events was ever written there, and all of them are in the range.
    """
    whole = range_[0] <= scope.begin + 1 and range_[1] >= scope.reached
    if scope.ever_written is None or scope.registered.prefill is not None or row.retried or not whole:
        return None
    accounted: int = row.copies + row.gone
    return max(scope.ever_written - accounted, 0)
