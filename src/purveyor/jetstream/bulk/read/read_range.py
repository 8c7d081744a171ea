"""`read_range`: a range of sequences of a stream as record batches, however it is best fetched."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.connection import Link
from purveyor.jetstream.bulk.net.pool import OutOfPatience, Patience, connect, give_back
from purveyor.jetstream.bulk.options import ReadOptions, Route
from purveyor.jetstream.bulk.read.cursor import Range
from purveyor.jetstream.bulk.read.via_consumer import consume
from purveyor.jetstream.bulk.read.via_direct_get import fetch
from purveyor.model.errors import InvalidConfig, InvalidInput, PurveyorError, Unavailable
from purveyor.model.name_rules import check_name

_DEFAULTS: Final = ReadOptions()
_SMALL_RANGE: Final = 2000


def read_range(
    address: Address, stream: str, first: int, last: int, options: ReadOptions = _DEFAULTS
) -> Generator[pa.RecordBatch, None, None]:
    """The messages with sequences from `first` to `last`, both included, in order, each once.

    Batches have the columns of `SCHEMA` (or those asked for) and are bounded by the options; no more than one is held.
    What is not there (gaps, a deleted end, beyond the end of the stream at the start of reading) is not waited for. A
    lost connection is made again within the patience, and reading goes on behind the last row given out. Closing the
    iterator early leaves nothing behind on the server.

    Fails with `UnknownStream` (also when it is deleted meanwhile), `InvalidConfig` (the stream cannot be read by that
    route), `PermissionDenied`, `AuthenticationFailed`, or `ServerUnavailable` at the end of the patience.

    >>> for batch in read_range(address, "ORDERS", 1, 1000):  # doctest: +SKIP
    ...     print(batch.num_rows)
    """
    check_name(stream)
    if first < 0 or last < 0:
        raise InvalidInput(f"invalid range {first} to {last} of stream {stream!r}", fix="sequences start at 1")
    return _read(address, Range(stream, max(first, 1), last, options))


def _read(address: Address, wanted: Range) -> Generator[pa.RecordBatch, None, None]:
    patience = Patience(wanted.options.patience_seconds)
    begun = False
    direct_only = False
    while wanted.first <= wanted.last:
        link = connect(address, patience)
        route = Route.DIRECT
        try:
            state = _look(link, wanted)
            wanted, begun = wanted if begun else wanted.within(state.first, state.last), True
            route = Route.DIRECT if direct_only else choose_route(state.config, wanted.options, wanted.length)
            if wanted.first > wanted.last:
                return
            way = consume if route is Route.CONSUMER else fetch
            with closing(way(link, wanted, patience)) as portions:
                for batch, following in portions:
                    patience.progress()
                    wanted = wanted.from_(following)
                    if batch.num_rows:
                        yield batch
        except OutOfPatience:
            raise
        except Unavailable as error:
            link.close()
            patience.failed(error)
        except PurveyorError:
            if direct_only or route is not Route.CONSUMER or not may_choose(state.config, wanted.options):
                raise
            direct_only = True  # we may not make a consumer there, or there are as many as it takes
        else:
            return
        finally:
            # Whichever way it ended, the route has tidied up behind itself: what still comes is for nobody.
            if link.usable:
                give_back(address, link)


@dataclass(frozen=True, slots=True)
class _State:
    first: int
    last: int
    config: dict[str, Any]


def _look(link: Link, wanted: Range) -> _State:
    info: dict[str, Any] = link.api(f"STREAM.INFO.{wanted.stream}")
    state = info["state"]
    return _State(int(state["first_seq"]), int(state["last_seq"]), info["config"])


def may_choose(config: dict[str, Any], options: ReadOptions) -> bool:
    """Whether there is another way than the consumer."""
    return bool(config.get("allow_direct")) and options.route is Route.AUTO


def choose_route(config: dict[str, Any], options: ReadOptions, length: int) -> Route:
    """The way to read a range of that length from a stream with that configuration."""
    name, retention = config.get("name"), config.get("retention", "limits")
    direct = bool(config.get("allow_direct"))
    # A consumer of a replicated interest stream is replicated as well, and slower made than the range is read.
    beside = retention == "interest" and options.kept_for_us and config.get("num_replicas", 1) == 1
    consumer = retention == "limits" or beside
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
    return Route.DIRECT if direct and (length <= _SMALL_RANGE or not consumer) else Route.CONSUMER
