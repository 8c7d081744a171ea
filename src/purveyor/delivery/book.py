"""The book of a subscription as JSON, in the bucket `acknowledged` under the subscription's name.

Whoever writes to the queue reads of it only `incarnation` and `position` (decision 3: what was acknowledged was
written). That the leases are in the same value makes an acknowledgement one write: the position is noted and the
message given up at once, or neither.
"""

from collections.abc import Mapping
from typing import Any

from purveyor.delivery import ends
from purveyor.delivery.done import Done, numbers, runs
from purveyor.delivery.words import Book, Lease, Wait
from purveyor.model import jsontext
from purveyor.model.done import Expired
from purveyor.model.errors import InvalidInput
from purveyor.model.jsontext import Json

_WHAT = "book of deliveries"


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
        value["ends"] = ends.to_json(book.ends)
    return jsontext.dump(value)


def decode(data: bytes) -> Book:
    """Checked; InvalidInput tells what is wrong. Only incarnation and position have to be there."""
    value = jsontext.parse(data, _WHAT)
    try:
        return Book(
            incarnation=jsontext.text(value, "incarnation", _WHAT),
            position=jsontext.whole(value, "position", _WHAT),
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
            ends=ends.from_json(value.get("ends") or ()),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"the {_WHAT} cannot be read: {error!r}", fix="who else writes to it?") from error


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
    return Lease(
        id=str(data["id"]),
        instance=str(data["instance"]),
        until=int(data["until"]),
        length=int(data["length"]),
        retry=numbers(data.get("retry") or ()),
        prefill=numbers(data.get("prefill") or ()),
        main=numbers(data.get("main") or ()),
        keys={int(sequence): str(key) for sequence, key in (data.get("keys") or {}).items()},
        ahead=bool(data.get("ahead")),
    )


def _pairs(found: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    return [] if found is None else [*found.items()]
