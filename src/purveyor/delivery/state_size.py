"""How many bytes a delivery state takes when it is stored, and how many messages more it has room for. Pure.

The state is one value of a bucket, and the server takes values up to its `max_payload`. What is acknowledged, given
back or put off has to fit at any time, so leases are refused before the state is full. What is counted is an upper
bound: each message that is leased is counted with what it may take later, when it is put off or when its neighbours
are acknowledged before it.

Notes of how deliveries ended (`Book.ends`) are not counted: they are left out when there is no room for them.
"""

import json
from functools import lru_cache
from itertools import chain
from typing import Final

from purveyor.delivery.message_keys import LONGEST_MARK
from purveyor.delivery.state import Ask, Book, Kind, Rules
from purveyor.model.delivery_policy import OrderBy

_BASE: Final = 700
"""All fields that are there once."""
_LEASE: Final = 190
"""A lease without its instance and its messages."""
_LATER: Final = 40
"""What a leased message takes more when it is put off: its attempts and the time, less its place in the lease."""
_PUTTING: Final = 30
_WIDEST: Final = 20
_FEW: Final = 200
"""With fewer entries than this the widest number is assumed: counting would cost more than it tells."""


def room(book: Book, ask: Ask, rules: Rules) -> int:
    """How many messages may be leased, for a request of an instance; 0 if there is no room.

    When nothing is leased, one message may be beyond the limit: it may be one that leaves a gap between those that are
    acknowledged, and without the gap the state is smaller. A tenth of the limit is kept for that.
    """
    width = _width(book)
    leased = sum(len(lease.sequences) for lease in book.leases)
    put_off_later = max(len(book.tries) - len(book.waits), 0)
    used = state_bytes(book) + leased * _LATER + put_off_later * _wait(width) + _LEASE + _text(ask.instance)
    each = _run(width) + _LATER + (_key(width) if rules.order_by is OrderBy.KEY else 0)
    found = (rules.state_bytes - used) // each
    if found <= 0 and not leased and used + each <= rules.state_bytes * 11 // 10:
        return 1
    return max(found, 0)


def state_bytes(book: Book) -> int:
    """An upper bound of the bytes of a stored state without its notes."""
    width = _width(book)
    run = _run(width)
    size = _BASE + sum(len(book.done(kind).ranges) for kind in Kind) * run
    for lease in book.leases:
        size += _LEASE + _text(lease.instance) + len(lease.sequences) * run
        size += len(lease.keys) * (width + 6) + sum(len(key.encode()) for key in lease.keys.values())
    size += len(book.tries) * (width + 10) + len(book.waits) * _wait(width)
    return size + len(book.putting) * _PUTTING


def _run(width: int) -> int:
    """A run of sequences, with its brackets and commas."""
    return 2 * width + 4


def _wait(width: int) -> int:
    """The time until which a message is put off."""
    return width + 32


def _key(width: int) -> int:
    """The mark of a key, at its longest, with its sequence."""
    return width + 4 + LONGEST_MARK


def _width(book: Book) -> int:
    """The digits of the highest sequence, and one for those that come."""
    count = len(book.tries) + len(book.waits) + len(book.leases)
    if count < _FEW:
        return _WIDEST
    leased = chain.from_iterable(lease.sequences for lease in book.leases)
    done = (book.done(kind).last for kind in Kind)
    return len(str(max(chain(book.tries, book.waits, leased, done)))) + 1


@lru_cache(maxsize=1000)
def _text(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode())
