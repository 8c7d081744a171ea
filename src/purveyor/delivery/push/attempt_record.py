"""The stored form of the attempts of a push subscription: records of at most `RECORD_BYTES`, and the search in them.

A record is a list of attempts. It stores each text that attempts share (topics, endpoints, errors) once. Pure.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from purveyor.delivery.dead_letters.park import MAX_EXCERPT_CHARACTERS
from purveyor.delivery.push.settlement import Action
from purveyor.model import json_fields
from purveyor.model.delivery_state import SubjectKind
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json, Kind

RECORD_BYTES: Final = 16 << 10
"""A record takes no more attempts when it has this size."""
MAX_TEXT_CHARACTERS: Final = MAX_EXCERPT_CHARACTERS
"""How much of a key, an id, an error or an answer an attempt keeps."""
MAX_ATTEMPTS_PER_PAGE: Final = 1000
_OMITTED_SPAN_MILLISECONDS: Final = 60_000
"""Attempts that are only counted are counted together for at most this time."""
_KIND: Final = Kind("record of push attempts", ("incarnation", "number", "texts", "attempts", "omitted"))
_ROW_LENGTH: Final = 15
_OMITTED_BYTES: Final = 40
_KINDS: Final = {kind.value: kind for kind in SubjectKind}
_ACTIONS: Final = {action.value: action for action in Action}


class PushAttempt(NamedTuple):
    """One attempt to push a message, and how it ended. A tuple, because a log has thousands."""

    at: int
    """When it ended, in milliseconds since 1970."""
    sequence: int
    position: int | None
    kind: SubjectKind
    realm: str
    topic: str
    key: str | None
    event_id: str
    """The id that the endpoint received."""
    endpoint: str
    attempt: int
    action: Action
    status: int | None
    error: str | None
    milliseconds: int
    excerpt: str
    """The beginning of the answer."""

    @property
    def id(self) -> str:
        """Return its id, which also orders attempts by time."""
        return attempt_id(self.order)

    @property
    def order(self) -> tuple[int, int, int]:
        """Return the id as numbers."""
        return self.at, self.sequence, self.attempt

    @property
    def time(self) -> datetime:
        """When it ended."""
        return datetime.fromtimestamp(self.at / 1000, UTC)

    @property
    def is_acknowledged(self) -> bool:
        """Whether the endpoint acknowledged the message."""
        return self.action is Action.ACKNOWLEDGE

    @property
    def outcome(self) -> str:
        """`acknowledged` or `failed`."""
        return "acknowledged" if self.is_acknowledged else "failed"

    def to_json(self) -> Json:
        """Return the form that the API and the CLI show."""
        return {
            "id": self.id,
            "time": self.time.isoformat(timespec="milliseconds"),
            "sequence": self.sequence,
            "position": self.position,
            "kind": self.kind.value,
            "realm": self.realm,
            "topic": self.topic,
            "key": self.key,
            "event_id": self.event_id,
            "endpoint": self.endpoint,
            "attempt": self.attempt,
            "outcome": self.outcome,
            "action": self.action.name.lower(),
            "status": self.status,
            "error": self.error,
            "seconds": self.milliseconds / 1000,
            "excerpt": self.excerpt or None,
        }


def attempt_id(order: tuple[int, int, int]) -> str:
    """Return the id of an attempt of these numbers.

    >>> attempt_id((1767225600000, 7, 2))
    '1767225600000-7-2'
    """
    return "-".join(map(str, order))


def parse_attempt_id(text: str) -> tuple[int, int, int]:
    """Parse the id of an attempt; InvalidInput if it is none.

    >>> parse_attempt_id("1767225600000-7-2")
    (1767225600000, 7, 2)
    """
    parts = text.split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdecimal() and len(part) <= 20 for part in parts):
        raise InvalidInput(f"{text[:80]!r} is not the id of an attempt", fix="give `next` of the page before")
    at, sequence, attempt = map(int, parts)
    return at, sequence, attempt


@dataclass(frozen=True, slots=True)
class OmittedAttempts:
    """Attempts between two times, in milliseconds since 1970, that were only counted."""

    begin: int
    end: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """Some attempts of a subscription, as they are stored. `number` counts the records of a ring."""

    number: int
    incarnation: str
    attempts: tuple[PushAttempt, ...] = ()
    omitted: tuple[OmittedAttempts, ...] = ()

    @classmethod
    def load(cls, data: bytes) -> "AttemptRecord":
        """Decode it; raise UnreadableRecord if a newer version wrote it."""
        return _KIND.read(data, _build)


class RecordBuilder:
    """A record that grows. It keeps attempts encoded: the newest record is stored once a second."""

    def __init__(self, number: int, incarnation: str) -> None:
        self.number = number
        self.incarnation = incarnation
        self._rows: list[bytes] = []
        self._texts: dict[str, int] = {}
        self._omitted: list[OmittedAttempts] = []
        self._size = 0

    @classmethod
    def from_record(cls, record: AttemptRecord) -> "RecordBuilder":
        """Return a builder that continues a stored record."""
        found = cls(record.number, record.incarnation)
        for each in record.attempts:
            found._append(each)
        found._omitted = [*record.omitted]
        return found

    @property
    def is_full(self) -> bool:
        """Whether it takes no more attempts."""
        return self._size >= RECORD_BYTES

    def plus(
        self, attempts: Sequence[PushAttempt], omitted: OmittedAttempts | None
    ) -> tuple["RecordBuilder", Sequence[PushAttempt]]:
        """Return a record with as many of these attempts as it takes, and the rest. This record stays as it is."""
        filled = RecordBuilder(self.number, self.incarnation)
        filled._rows, filled._texts, filled._size = [*self._rows], {**self._texts}, self._size
        filled._omitted = _add_omitted(self._omitted, omitted)
        filled._size += _OMITTED_BYTES * (len(filled._omitted) - len(self._omitted))
        taken = 0
        for each in attempts:
            if filled.is_full:
                break
            filled._append(each)
            taken += 1
        return filled, attempts[taken:]

    def dump(self) -> bytes:
        """Encode it."""
        omitted = [[each.begin, each.end, each.count] for each in self._omitted]
        fields: Json = {"incarnation": self.incarnation, "number": self.number, "texts": [*self._texts]}
        return b'%s,"attempts":[%s]}' % (_KIND.dump({**fields, "omitted": omitted})[:-1], b",".join(self._rows))

    def _append(self, each: PushAttempt) -> None:
        known = len(self._texts)
        row = _encode(each, self._texts)
        self._rows.append(row)
        self._size += len(row) + 1
        if len(self._texts) > known:
            self._size += sum(len(text.encode()) + 3 for text in [*self._texts][known:])


def _add_omitted(known: Sequence[OmittedAttempts], new: OmittedAttempts | None) -> list[OmittedAttempts]:
    if new is None:
        return [*known]
    if known and new.end - known[-1].begin <= _OMITTED_SPAN_MILLISECONDS:
        last = known[-1]
        return [
            *known[:-1],
            OmittedAttempts(min(last.begin, new.begin), max(last.end, new.end), last.count + new.count),
        ]
    return [*known, new]


def _encode(each: PushAttempt, texts: dict[str, int]) -> bytes:
    """Encode an attempt. Texts that attempts share are numbers in it; new ones are added to `texts`."""

    def number(text: str | None) -> int | None:
        return None if text is None else texts.setdefault(text, len(texts))

    row = (
        each.at,
        each.sequence,
        each.position,
        each.kind.value,
        number(each.realm),
        number(each.topic),
        each.key,
        each.event_id,
        number(each.endpoint),
        each.attempt,
        each.action.value,
        each.status,
        number(each.error),
        each.milliseconds,
        number(each.excerpt),
    )
    return json.dumps(row, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def _build(given: Json) -> AttemptRecord:
    fields = _KIND.check(given)
    texts, rows, omitted = (fields.get(name) for name in ("texts", "attempts", "omitted"))
    what = _KIND.what
    try:
        attempts = tuple(_decode(row, texts) for row in rows)  # type: ignore[union-attr]
        counts = tuple(OmittedAttempts(*map(int, each)) for each in omitted)  # type: ignore[union-attr]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise InvalidInput(f"the {what} is damaged: {error}") from None
    return AttemptRecord(
        number=json_fields.whole(fields, "number", what),
        incarnation=json_fields.text(fields, "incarnation", what),
        attempts=attempts,
        omitted=counts,
    )


def _decode(row: Any, texts: Any) -> PushAttempt:
    if len(row) != _ROW_LENGTH:
        raise ValueError(f"an attempt has {len(row)} fields")
    return PushAttempt(
        at=int(row[0]),
        sequence=int(row[1]),
        position=None if row[2] is None else int(row[2]),
        kind=_KINDS[row[3]],
        realm=str(texts[row[4]]),
        topic=str(texts[row[5]]),
        key=None if row[6] is None else str(row[6]),
        event_id=str(row[7]),
        endpoint=str(texts[row[8]]),
        attempt=int(row[9]),
        action=_ACTIONS[row[10]],
        status=None if row[11] is None else int(row[11]),
        error=None if row[12] is None else str(texts[row[12]]),
        milliseconds=int(row[13]),
        excerpt=str(texts[row[14]]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptQuery:
    """Which attempts to return: those that fulfil every given condition, the newest first."""

    key: str | None = None
    """A part of the key; upper and lower case are the same."""
    since: datetime | None = None
    until: datetime | None = None
    is_acknowledged: bool | None = None
    before: tuple[int, int, int] | None = None
    """Only attempts before this one."""
    limit: int = 100

    def matches(self, attempt: PushAttempt) -> bool:
        """Return whether an attempt fulfils the conditions."""
        return (
            (self.key is None or self.key.casefold() in (attempt.key or "").casefold())
            and (self.since is None or attempt.time >= self.since)
            and (self.until is None or attempt.time <= self.until)
            and (self.is_acknowledged is None or attempt.is_acknowledged is self.is_acknowledged)
            and (self.before is None or attempt.order < self.before)
        )

    def overlaps(self, omitted: OmittedAttempts) -> bool:
        """Return whether attempts that were only counted are of the time that the query asks for."""
        return (self.since is None or omitted.end >= self.since.timestamp() * 1000) and (
            self.until is None or omitted.begin <= self.until.timestamp() * 1000
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPage:
    """Attempts, the newest first."""

    attempts: tuple[PushAttempt, ...] = ()
    next: str | None = None
    """The id to give as `before` for the next page; None: there are no more."""
    omitted: int = 0
    """How many attempts of the time were only counted."""
    unreadable: str | None = None
    """Why some records cannot be read."""

    def to_json(self) -> Json:
        """Return the form that the API and the CLI show."""
        found: Json = {
            "attempts": [each.to_json() for each in self.attempts],
            "next": self.next,
            "omitted": self.omitted,
        }
        return found if self.unreadable is None else {**found, "unreadable": self.unreadable}


def search(records: Iterable[AttemptRecord], query: AttemptQuery, unreadable: str | None = None) -> AttemptPage:
    """Return a page of the attempts in records of one incarnation."""
    found: dict[tuple[int, int, int], PushAttempt] = {}
    omitted = 0
    for record in records:
        found.update((each.order, each) for each in record.attempts if query.matches(each))
        omitted += sum(each.count for each in record.omitted if query.overlaps(each))
    ordered = sorted(found.values(), key=lambda each: each.order, reverse=True)
    shown = tuple(ordered[: query.limit])
    has_more = len(ordered) > len(shown)
    return AttemptPage(attempts=shown, next=shown[-1].id if has_more else None, omitted=omitted, unreadable=unreadable)
