"""The delivery state of a subscription, and the only codec of its stored form. Pure.

The state is one JSON value in the bucket `acknowledged`, under the name of the subscription. Leases and acknowledged
ranges share one value on purpose: an acknowledgement is a single write that stores the position and ends the lease.

Delivery reads and writes the whole state (`decode`, `encode`). Other parts need a few fields: the audit and the status
read an `AckSummary` (`decode_summary`), the dispatcher reads the position (`acked_position`). Everything up to that
position was written to the queue once (decision 3 in DESIGN.md).

The types are named tuples: delivery makes several for each message, and frozen dataclasses cost several times as much.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar, assert_never

from purveyor.model import json_fields
from purveyor.model.ack_ranges import AckRanges, Expired, from_runs, to_runs
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json, Kind

DELIVERY_STATE: Final = Kind(
    "delivery state",
    (
        "incarnation",
        "position",
        "prefill",
        "main",
        "granted",
        "retry",
        "retry_to",
        "putting",
        "expired",
        "leases",
        "tries",
        "waits",
        "ends",
    ),
)
"""The stored record. Its field names are older than the attribute names below, and stay."""
_RECORD: Final = DELIVERY_STATE.what
_LEASE_FIELDS: Final = frozenset({"id", "instance", "until", "length", "retry", "prefill", "main", "keys", "ahead"})
_SUBJECTS: Final = ("retry", "prefill", "main")
_EMPTY: Final[Mapping[int, Any]] = MappingProxyType({})
_V = TypeVar("_V")

MAX_PLAIN_KEY_BYTES: Final = 64
"""Keys up to this size are stored as they are."""
MAX_COMPACT_KEY_BYTES: Final = MAX_PLAIN_KEY_BYTES + 2
"""The largest compact key in JSON, with its quotes."""
_DIGEST_BYTES: Final = 16
_DIGEST_PREFIX: Final = "#"

_BASE_BYTES: Final = 700
"""All fields that occur once."""
LEASE_BYTES: Final = 190
"""A lease without its instance and its messages."""
_REDRIVE_BYTES: Final = 30
_MAX_DIGITS: Final = 20
_COUNTED_ENTRIES: Final = 200
"""With fewer entries the widest number is assumed: counting the digits would cost more than it saves."""


class SubjectKind(Enum):
    """The subjects of a subscription's queue, in the order of delivery."""

    RETRY = "retry"
    """Redriven dead letters."""
    PREFILL = "prefill"
    MAIN = "main"

    __hash__ = object.__hash__  # by identity: the hash of an enum by its name is a call in Python


class Lease(NamedTuple):
    """Messages that one instance may process until a time. Times are milliseconds since 1970."""

    id: str
    instance: str
    until: int
    duration: int
    """In milliseconds, as granted."""
    retry: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()
    main: tuple[int, ...] = ()
    keys: Mapping[int, str] = _EMPTY
    """The compact keys of its messages, with order by key."""
    prefetched: bool = False
    """Whether an acknowledgement granted it before the instance asked: perhaps it was never delivered."""

    @property
    def sequences(self) -> tuple[int, ...]:
        """All its messages, in the order of delivery."""
        return self.retry + self.prefill + self.main

    def without(self, sequences: frozenset[int]) -> "Lease":
        """Return the lease without some of its messages."""
        return self._replace(
            retry=tuple(sequence for sequence in self.retry if sequence not in sequences),
            prefill=tuple(sequence for sequence in self.prefill if sequence not in sequences),
            main=tuple(sequence for sequence in self.main if sequence not in sequences),
            keys=without_sequences(self.keys, sequences),
        )


class Delay(NamedTuple):
    """A message is not delivered before `until`; `duration` is the delay as it was requested."""

    until: int
    duration: int


class FailureCause(Enum):
    """Why a delivery ended without an acknowledgement."""

    LEASE_EXPIRED = "ran out"
    REQUESTED_AGAIN = "asked again"
    """Ordered delivery: the instance asked for messages before it answered for this one."""
    NACKED = "retry"


_CAUSES: Final = frozenset(cause.value for cause in FailureCause)


class FailedDelivery(NamedTuple):
    """When and why a delivery failed, and which instance had the message."""

    at: int
    cause: FailureCause
    instance: str

    def describe(self) -> str:
        """Return the failure in words, as status and dead letters show it."""
        match self.cause:
            case FailureCause.LEASE_EXPIRED:
                return f"the lease of instance {self.instance!r} expired"
            case FailureCause.REQUESTED_AGAIN:
                return f"instance {self.instance!r} asked for the next message without an answer to this one"
            case FailureCause.NACKED:
                return f"instance {self.instance!r} asked for a retry"
            case _:
                assert_never(self.cause)


Failures = Mapping[int, tuple[FailedDelivery, ...]]


class DeliveryState(NamedTuple):
    """Everything that is stored about the deliveries of one subscription."""

    incarnation: str
    position: int = 0
    """The highest acknowledged position; 0 if there is none. Everything up to it was written to the queue once."""
    retry: AckRanges = AckRanges()
    prefill: AckRanges = AckRanges()
    main: AckRanges = AckRanges()
    leases: tuple[Lease, ...] = ()
    delivery_counts: Mapping[int, int] = _EMPTY
    """How often each message was delivered before its current lease. Messages with 0 are not in it."""
    delayed: Mapping[int, Delay] = _EMPTY
    lease_counter: int = 0
    """How many leases were granted. The ids of leases are these numbers."""
    redriven_up_to: int = 0
    """The highest sequence of a redriven dead letter. A process reads up to it before it leases anything."""
    redriving: Mapping[int, bool] = _EMPTY
    """Dead letters whose redrive is under way, and whether the redriven message is acknowledged already."""
    expired: Expired = Expired()
    failures: Failures = _EMPTY
    """The last failed deliveries of each message."""

    def acked(self, kind: SubjectKind) -> AckRanges:
        """Return what is acknowledged of a subject."""
        match kind:
            case SubjectKind.MAIN:
                return self.main
            case SubjectKind.PREFILL:
                return self.prefill
            case SubjectKind.RETRY:
                return self.retry

    def with_acked(self, kind: SubjectKind, acked: AckRanges) -> "DeliveryState":
        """Return the state with other acknowledged ranges of a subject."""
        match kind:
            case SubjectKind.MAIN:
                return self._replace(main=acked)
            case SubjectKind.PREFILL:
                return self._replace(prefill=acked)
            case SubjectKind.RETRY:
                return self._replace(retry=acked)

    def lease_of(self, sequence: int) -> Lease | None:
        """Return the lease that contains a message."""
        return next((lease for lease in self.leases if sequence in lease.sequences), None)

    def deliveries(self, sequence: int) -> int:
        """Return how often a message was delivered, including its current lease."""
        return self.delivery_counts.get(sequence, 0) + (self.lease_of(sequence) is not None)


class AckSummary(NamedTuple):
    """The fields of a delivery state that parts outside delivery read."""

    incarnation: str
    position: int
    """The highest acknowledged position; 0 if there is none."""
    main: AckRanges | None = None
    """None if the value does not have it: an older program wrote only the position."""
    retry: AckRanges = AckRanges()
    redriven_up_to: int = 0
    expired: Expired = Expired()
    last_sequence: int = 0
    """The highest sequence in the state: acknowledged, leased, delayed or redriven."""


def without_sequences(found: Mapping[int, _V], sequences: frozenset[int]) -> Mapping[int, _V]:
    """Return a mapping without some messages; the same object if it has none of them."""
    if sequences.isdisjoint(found):
        return found
    return {sequence: value for sequence, value in found.items() if sequence not in sequences}


def encode(state: DeliveryState) -> bytes:
    """Encode a state. Empty fields are omitted: most states are short."""
    value: Json = {
        "incarnation": state.incarnation,
        "position": state.position,
        "prefill": state.prefill.to_json(),
        "main": state.main.to_json(),
        "granted": state.lease_counter,
    }
    if state.redriven_up_to or state.retry.last:
        value["retry"], value["retry_to"] = state.retry.to_json(), state.redriven_up_to
    if state.redriving:
        value["putting"] = {str(letter): acked for letter, acked in state.redriving.items()}
    if state.expired.count:
        value["expired"] = state.expired.to_json()
    if state.leases:
        value["leases"] = [_lease_to_json(lease) for lease in state.leases]
    if state.delivery_counts:
        value["tries"] = {str(sequence): count for sequence, count in state.delivery_counts.items()}
    if state.delayed:
        value["waits"] = {str(sequence): [delay.until, delay.duration] for sequence, delay in state.delayed.items()}
    if state.failures:
        value["ends"] = _failures_to_json(state.failures)
    return DELIVERY_STATE.dump(value)


def decode(data: bytes, of: str = "") -> DeliveryState:
    """Decode a state; `UnreadableRecord` if its version or a field is unknown. Only two fields are required."""
    return DELIVERY_STATE.read(data, _build, of)


def decode_summary(data: bytes, of: str = "") -> AckSummary:
    """Decode the fields of an `AckSummary`; `UnreadableRecord` if the version is unknown. Other fields may be new."""
    return DELIVERY_STATE.read(data, _build_summary, of)


def acked_position(value: Json, incarnation: str | None) -> int:
    """Return the acknowledged position of a decoded value; 0 if the value is of another incarnation.

    UnreadableRecord if the version is unknown; ValueError, TypeError or KeyError if there is no position.
    """
    DELIVERY_STATE.check_version(value)
    if incarnation is not None and value.get("incarnation") != incarnation:
        return 0
    return int(value["position"])


def incarnation_of(data: bytes) -> str | None:
    """Return the incarnation of a state of any version; None if there is none."""
    try:
        found = json_fields.parse(data, _RECORD).get("incarnation")
    except InvalidInput:
        return None
    return found if isinstance(found, str) else None


def _build(given: Json) -> DeliveryState:
    value = DELIVERY_STATE.check(given)
    try:
        return DeliveryState(
            incarnation=json_fields.text(value, "incarnation", _RECORD),
            position=json_fields.whole(value, "position", _RECORD),
            retry=AckRanges.from_json(value.get("retry")),
            prefill=AckRanges.from_json(value.get("prefill")),
            main=AckRanges.from_json(value.get("main")),
            leases=tuple(_lease_from_json(lease) for lease in value.get("leases") or ()),
            delivery_counts={int(sequence): int(count) for sequence, count in (value.get("tries") or {}).items()},
            delayed={int(key): Delay(int(until), int(ms)) for key, (until, ms) in (value.get("waits") or {}).items()},
            lease_counter=int(value.get("granted") or 0),
            redriven_up_to=int(value.get("retry_to") or 0),
            redriving={int(letter): bool(acked) for letter, acked in (value.get("putting") or {}).items()},
            expired=Expired.from_json(value.get("expired")),
            failures=_failures_from_json(value.get("ends") or ()),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(repr(error)) from error


def _build_summary(given: Json) -> AckSummary:
    DELIVERY_STATE.check_version(given)
    main, prefill, retry = (AckRanges.from_json(given.get(part)) for part in ("main", "prefill", "retry"))
    try:
        named = [int(sequence) for part in ("tries", "waits") for sequence in given.get(part) or {}]
        leases = [lease for lease in given.get("leases") or () if isinstance(lease, Mapping)]
        runs = [run for lease in leases for part in _SUBJECTS for run in lease.get(part) or ()]
        named += [int(end) for _, end in runs]
        redriven_up_to = int(given.get("retry_to") or 0)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"it names no sequences: {error}", fix="find out which program wrote it") from None
    return AckSummary(
        incarnation=json_fields.text(given, "incarnation", _RECORD),
        position=json_fields.whole(given, "position", _RECORD),
        main=main if "main" in given else None,
        retry=retry,
        redriven_up_to=redriven_up_to,
        expired=Expired.from_json(given.get("expired")),
        last_sequence=max([main.last, prefill.last, retry.last, redriven_up_to, *named]),
    )


def _lease_to_json(lease: Lease) -> Json:
    subjects = ("retry", lease.retry), ("prefill", lease.prefill), ("main", lease.main)
    return {
        "id": lease.id,
        "instance": lease.instance,
        "until": lease.until,
        "length": lease.duration,
        **{name: to_runs(found) for name, found in subjects if found},
        **({"keys": {str(sequence): key for sequence, key in lease.keys.items()}} if lease.keys else {}),
        **({"ahead": True} if lease.prefetched else {}),
    }


def _lease_from_json(data: Mapping[str, Any]) -> Lease:
    if not data.keys() <= _LEASE_FIELDS:
        raise ValueError(f"a lease with the field {min(data.keys() - _LEASE_FIELDS)!r}")
    return Lease(
        id=str(data["id"]),
        instance=str(data["instance"]),
        until=int(data["until"]),
        duration=int(data["length"]),
        retry=from_runs(data.get("retry") or ()),
        prefill=from_runs(data.get("prefill") or ()),
        main=from_runs(data.get("main") or ()),
        # Older versions stored whole keys.
        keys={int(sequence): compact_key(str(key)) for sequence, key in (data.get("keys") or {}).items()},
        prefetched=bool(data.get("ahead")),
    )


def _failures_to_json(failures: Failures) -> list[Any]:
    """Sort by time. Messages of one lease failed alike and share one entry."""
    alike: dict[FailedDelivery, list[int]] = {}
    for sequence, found in failures.items():
        for failure in found:
            alike.setdefault(failure, []).append(sequence)
    return [
        [failure.at, failure.cause.value, failure.instance, to_runs(sorted(alike[failure]))]
        for failure in sorted(alike, key=lambda each: (each.at, each.cause.value, each.instance))
    ]


def _failures_from_json(data: Iterable[Any]) -> Failures:
    """Read what `_failures_to_json` returns. Unknown causes are omitted: these entries are for people only."""
    failures: dict[int, tuple[FailedDelivery, ...]] = {}
    for at, cause, instance, runs in data:
        if cause in _CAUSES:
            failure = FailedDelivery(int(at), FailureCause(cause), str(instance))
            for sequence in from_runs(runs):
                failures[sequence] = (*failures.get(sequence, ()), failure)
    return failures


def compact_key(key: str) -> str:
    """Return the form in which the state stores a key: short keys as they are, others as a digest.

    A state holds one key for each leased message and has to fit into one value of the server, but a key may be as long
    as an event allows. Short keys stay plain because an older version, which compares whole keys, may read the state.
    The compact form of a compact key is itself, so states of all versions are read in the same way.

    >>> compact_key("u-1"), compact_key("x" * 1000)
    ('u-1', '#ybK9T_SHhkwp-0H6s-gYfg')
    """
    plain = len(key) <= MAX_PLAIN_KEY_BYTES and key.isprintable() and '"' not in key and "\\" not in key
    if plain and (key.isascii() or len(key.encode()) <= MAX_PLAIN_KEY_BYTES):
        return key
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
    return _DIGEST_PREFIX + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def max_encoded_bytes(state: DeliveryState) -> int:
    """Return an upper bound of the encoded size without `failures`, which are dropped when there is no room."""
    digits = sequence_digits(state)
    run = run_bytes(digits)
    size = _BASE_BYTES + sum(len(state.acked(kind).ranges) for kind in SubjectKind) * run
    for lease in state.leases:
        size += LEASE_BYTES + text_bytes(lease.instance) + len(lease.sequences) * run
        size += len(lease.keys) * (digits + 6) + sum(len(key.encode()) for key in lease.keys.values())
    size += len(state.delivery_counts) * (digits + 10) + len(state.delayed) * delay_bytes(digits)
    return size + len(state.redriving) * _REDRIVE_BYTES


def run_bytes(digits: int) -> int:
    """Return the size of a run of sequences, with its brackets and commas."""
    return 2 * digits + 4


def delay_bytes(digits: int) -> int:
    """Return the size of a delay of one message."""
    return digits + 32


def sequence_digits(state: DeliveryState) -> int:
    """Return the digits of the highest sequence, plus one for later sequences."""
    count = len(state.delivery_counts) + len(state.delayed) + len(state.leases)
    if count < _COUNTED_ENTRIES:
        return _MAX_DIGITS
    leased = chain.from_iterable(lease.sequences for lease in state.leases)
    acked = (state.acked(kind).last for kind in SubjectKind)
    return len(str(max(chain(state.delivery_counts, state.delayed, leased, acked)))) + 1


@lru_cache(maxsize=1000)
def text_bytes(text: str) -> int:
    """Return the size of a text in JSON."""
    return len(json.dumps(text, ensure_ascii=False).encode())
