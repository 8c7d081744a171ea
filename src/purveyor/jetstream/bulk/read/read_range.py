"""`read_range`: read a range of sequences of a stream as record batches, by the best route."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.connection import BulkConnection
from purveyor.jetstream.bulk.net.pool import RetryDeadline, RetryDeadlineExceeded, connect, release
from purveyor.jetstream.bulk.options import ReadOptions, Route
from purveyor.jetstream.bulk.read.cursor import RangeCursor
from purveyor.jetstream.bulk.read.via_consumer import read_via_consumer
from purveyor.jetstream.bulk.read.via_direct_get import read_via_direct_get
from purveyor.model.errors import InvalidConfig, InvalidInput, PurveyorError, Unavailable
from purveyor.model.name_rules import check_name

_DEFAULTS: Final = ReadOptions()
_MAX_DIRECT_GET_LENGTH: Final = 2000


def read_range(
    address: Address, stream: str, first: int, last: int, options: ReadOptions = _DEFAULTS
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the messages with sequences from `first` to `last`, both included, in order, each once.

    Batches have the columns of `SCHEMA` (or the requested ones) and a size bounded by the options; one batch is in
    memory at a time. The function does not wait for missing messages (gaps, a deleted end, sequences beyond the end of
    the stream at the start of reading). It reconnects for up to `patience_seconds` and continues after the last row.
    Closing the iterator early leaves nothing behind on the server.

    Raise `UnknownStream` (also if the stream is deleted meanwhile), `InvalidConfig` (the stream cannot be read by that
    route), `PermissionDenied`, `AuthenticationFailed`, or `ServerUnavailable` after `patience_seconds`.

    >>> for batch in read_range(address, "ORDERS", 1, 1000):  # doctest: +SKIP
    ...     print(batch.num_rows)
    """
    check_name(stream)
    if first < 0 or last < 0:
        raise InvalidInput(f"invalid range {first} to {last} of stream {stream!r}", fix="sequences start at 1")
    return _read(address, RangeCursor(stream, max(first, 1), last, options))


def _read(address: Address, cursor: RangeCursor) -> Generator[pa.RecordBatch, None, None]:
    retry_deadline = RetryDeadline(cursor.options.patience_seconds)
    begun = False
    direct_only = False
    while cursor.first <= cursor.last:
        connection = connect(address, retry_deadline)
        route = Route.DIRECT
        try:
            state = _read_state(connection, cursor)
            cursor, begun = cursor if begun else cursor.clamp(state.first, state.last), True
            route = Route.DIRECT if direct_only else choose_route(state.config, cursor.options, cursor.length)
            if cursor.first > cursor.last:
                return
            read = read_via_consumer if route is Route.CONSUMER else read_via_direct_get
            with closing(read(connection, cursor, retry_deadline)) as batches:
                for batch, following in batches:
                    retry_deadline.progress()
                    cursor = cursor.advance_to(following)
                    if batch.num_rows:
                        yield batch
        except RetryDeadlineExceeded:
            raise
        except Unavailable as error:
            connection.close()
            retry_deadline.pause_or_raise(error)
        except PurveyorError:
            if direct_only or route is not Route.CONSUMER or not can_use_direct_get(state.config, cursor.options):
                raise
            direct_only = True  # we may not create a consumer there, or the stream has its maximum of consumers
        else:
            return
        finally:
            # The route has ended its subscription, whichever way it ended: later frames are ignored.
            if connection.is_usable:
                release(address, connection)


@dataclass(frozen=True, slots=True)
class _State:
    first: int
    last: int
    config: dict[str, Any]


def _read_state(connection: BulkConnection, cursor: RangeCursor) -> _State:
    info: dict[str, Any] = connection.request_api(f"STREAM.INFO.{cursor.stream}")
    state = info["state"]
    return _State(int(state["first_seq"]), int(state["last_seq"]), info["config"])


def can_use_direct_get(config: dict[str, Any], options: ReadOptions) -> bool:
    """Return whether the stream can also be read without a consumer."""
    return bool(config.get("allow_direct")) and options.route is Route.AUTO


def choose_route(config: dict[str, Any], options: ReadOptions, length: int) -> Route:
    """Return the route for a range of this length in a stream with this configuration."""
    name, retention = config.get("name"), config.get("retention", "limits")
    direct = bool(config.get("allow_direct"))
    # A consumer of a replicated interest stream is replicated as well: creating it takes longer than reading.
    harmless = retention == "interest" and options.retained_by_durable and config.get("num_replicas", 1) == 1
    consumer = retention == "limits" or harmless
    if options.route is Route.CONSUMER and not consumer:
        raise InvalidConfig(
            f"stream {name!r} has {retention} retention: a reading consumer would change what it keeps",
            fix="read it with Route.DIRECT",
        )
    if not direct and (options.route is Route.DIRECT or retention != "limits"):
        raise InvalidConfig(
            f"stream {name!r} ({retention} retention) cannot be read by sequence: it does not allow direct gets",
            fix="switch allow_direct on for the stream",
        )
    if options.route is not Route.AUTO:
        return options.route
    return Route.DIRECT if direct and (length <= _MAX_DIRECT_GET_LENGTH or not consumer) else Route.CONSUMER
