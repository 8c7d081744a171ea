"""The book of a subscription as JSON, in the bucket `acknowledged` under the subscription's name.

Whoever writes to the queue reads of it only `incarnation` and `position` (decision 3: what was acknowledged was
written). That the leases are in the same value makes an acknowledgement one write: the position is noted and the
message given up at once, or neither.
"""

from collections.abc import Mapping
from typing import Any

from purveyor.delivery import failure_history
from purveyor.delivery.done import Done, numbers, runs
from purveyor.delivery.message_keys import mark
from purveyor.delivery.state import Book, Lease, Wait
from purveyor.model import json_fields
from purveyor.model.ack_ranges import DELIVERY_STATE, Expired
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json

_WHAT = DELIVERY_STATE.what
_LEASE_FIELDS = frozenset({"id", "instance", "until", "length", "retry", "prefill", "main", "keys", "ahead"})


def encode(book: Book) -> bytes:
    """The value of its key. What is empty is left out: most books are short."""
    value: Json = {
        "incarnation": book.incarnation,
        "position": book.position,
        "prefill": book.prefill.to_json(),
        "main": book.main.to_json(),
        "granted": book.granted,
    }
    if book.retry_to or book.retry.last:
        value["retry"], value["retry_to"] = book.retry.to_json(), book.retry_to
    if book.putting:
        value["putting"] = {str(letter): done for letter, done in book.putting.items()}
    if book.expired.count:
        value["expired"] = book.expired.to_json()
    if book.leases:
        value["leases"] = [_lease(lease) for lease in book.leases]
    if book.tries:
        value["tries"] = {str(sequence): count for sequence, count in book.tries.items()}
    if book.waits:
        value["waits"] = {str(sequence): [wait.until, wait.length] for sequence, wait in book.waits.items()}
    if book.ends:
        value["ends"] = failure_history.to_json(book.ends)
    return DELIVERY_STATE.dump(value)


def decode(data: bytes, of: str = "") -> Book:
    """Checked; UnreadableRecord tells what is not understood. Only incarnation and position have to be there."""
    return DELIVERY_STATE.read(data, _build, of)


def _build(given: Json) -> Book:
    value = DELIVERY_STATE.check(given)
    try:
        return Book(
            incarnation=json_fields.text(value, "incarnation", _WHAT),
            position=json_fields.whole(value, "position", _WHAT),
            retry=Done.from_json(value.get("retry")),
            prefill=Done.from_json(value.get("prefill")),
            main=Done.from_json(value.get("main")),
            leases=tuple(_read_lease(lease) for lease in value.get("leases") or ()),
            tries={int(sequence): int(count) for sequence, count in (value.get("tries") or {}).items()},
            waits={int(key): Wait(int(until), int(length)) for key, (until, length) in _pairs(value.get("waits"))},
            granted=int(value.get("granted") or 0),
            retry_to=int(value.get("retry_to") or 0),
            putting={int(letter): bool(done) for letter, done in (value.get("putting") or {}).items()},
            expired=Expired.from_json(value.get("expired")),
            ends=failure_history.from_json(value.get("ends") or ()),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(repr(error)) from error


def _lease(lease: Lease) -> Json:
    return {
        "id": lease.id,
        "instance": lease.instance,
        "until": lease.until,
        "length": lease.length,
        **{name: runs(found) for name, found in _subjects(lease) if found},
        **({"keys": {str(sequence): key for sequence, key in lease.keys.items()}} if lease.keys else {}),
        **({"ahead": True} if lease.ahead else {}),
    }


def _subjects(lease: Lease) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return ("retry", lease.retry), ("prefill", lease.prefill), ("main", lease.main)


def _read_lease(data: Mapping[str, Any]) -> Lease:
    if not data.keys() <= _LEASE_FIELDS:
        raise ValueError(f"a lease with the field {min(data.keys() - _LEASE_FIELDS)!r}")
    return Lease(
        id=str(data["id"]),
        instance=str(data["instance"]),
        until=int(data["until"]),
        length=int(data["length"]),
        retry=numbers(data.get("retry") or ()),
        prefill=numbers(data.get("prefill") or ()),
        main=numbers(data.get("main") or ()),
        keys={int(sequence): mark(str(key)) for sequence, key in (data.get("keys") or {}).items()},  # once: whole keys
        ahead=bool(data.get("ahead")),
    )


def _pairs(found: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    return [] if found is None else [*found.items()]
