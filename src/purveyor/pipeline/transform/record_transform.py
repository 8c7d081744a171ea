"""From a message of the queue `ldif` to what is written: events, or a dead letter with the reason. Pure.

Every outcome has a position: the message's sequence times 2**20 plus its number among the outcomes of that message. It
is the same however often a batch is run, so it tells what was written already. A message can give both events and a
dead letter: an entry that was an object and is none any more is deleted for its subscribers, and parked for operators.
"""

import uuid
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from purveyor.jetstream.headers import Headers
from purveyor.model.errors import InvalidInput, PurveyorError, describe
from purveyor.model.event import Event
from purveyor.model.event_limits import encode_checked
from purveyor.pipeline.transform.directory_rules import Changed, Entry, Store, apply, undo
from purveyor.pipeline.transform.dn import Unfit
from purveyor.pipeline.transform.mapping import Mapped, Mapping, Unmatched, classes_of
from purveyor.pipeline.transform.records import parse_record
from purveyor.queues.dead_letters.letter import DeadLetter, fitted

ORIGIN: Final = "transform"
PUBLISHER: Final = "ldif"
POSITION_BITS: Final = 20
HEADER_ROOM: Final = 512
"""Bytes left for the headers of an event."""
Object: TypeAlias = MappingOf[str, Any]
_NOTHING: Final[Object] = {}
_NAMESPACE: Final = uuid.UUID("6f0b1f2c-9d0e-5c4b-8a55-6c1d3b0f7a21")


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the queue `ldif`."""

    sequence: int
    stored: datetime
    subject: str
    headers: Headers
    data: bytes

    @property
    def origin(self) -> str:
        """What no other message has, in this stream or in one that was there before under its name."""
        return f"{self.subject}:{self.sequence}:{int(self.stored.timestamp() * 1_000_000)}"


@dataclass(frozen=True, slots=True)
class Output:
    """A message to be written: an event, or a dead letter."""

    position: int
    parked: bool
    data: bytes
    headers: Headers
    msg_id: str


@dataclass(frozen=True, slots=True)
class Rules:
    """What is decided outside of the directory."""

    mapping: Mapping
    max_payload: int
    """The largest message that the server takes."""


def transform(store: Store, rules: Rules, message: Message) -> list[Output]:
    """Apply a message to the directory and tell what is to be written.

    A message that these rules fail on, for a reason that they do not expect, is parked as well, and the directory is as
    it was before: another attempt fails in the same way, and keeps back everything behind it. An outage, and an error
    of the store, is not the fault of the message.
    """
    problems: list[str] = []
    changes: list[Changed] = []
    try:
        try:
            changes = apply(store, parse_record(message.data), str(uuid.uuid5(_NAMESPACE, message.origin)))
        except Unfit as error:
            problems.append(str(error))
        return list(_outputs(rules, message, changes, problems))
    except (MemoryError, OSError):
        raise
    except Exception as error:
        if isinstance(error, PurveyorError) and not isinstance(error, InvalidInput):
            raise
        undo(store, changes)
        reason = f"the transform fails on it: {describe(error)}"
        return [_parked(message, reason, message.sequence << POSITION_BITS, rules.max_payload)]


def _outputs(rules: Rules, message: Message, changes: Sequence[Changed], unfit: Sequence[str]) -> Iterator[Output]:
    problems = list(unfit)
    number = message.sequence << POSITION_BITS
    for nth, change in enumerate(changes):
        old, new = (_view(rules.mapping, entry) for entry in (change.before, change.after))
        if nth == 0 and change.after is not None:  # the first is the entry that the message is about
            problems += _complaints(new, change.after)
        for event in events(_seen(old), _seen(new), message.stored):
            try:
                data = encode_checked(event)
            except InvalidInput as error:
                problems.append(str(error))
                continue
            if len(data) + HEADER_ROOM > rules.max_payload:
                problems.append(f"an event of {len(data)} bytes is more than a message can hold")
                continue
            yield Output(number, False, data, {}, f"{message.origin}:{number - (message.sequence << POSITION_BITS)}")
            number += 1
    if problems:
        yield _parked(message, "; ".join(dict.fromkeys(problems)), number, rules.max_payload)


def events(old: Mapped | None, new: Mapped | None, moment: datetime) -> Iterator[Event]:
    """What subscribers are told of a change: nothing when they see no difference."""
    if old is not None and new is not None and _place(old) == _place(new):
        if old.object != new.object:
            yield _event(moment, new, old=old.object, new=new.object)
        return
    if old is not None:
        yield _event(moment, old, old=old.object)
    if new is not None:
        yield _event(moment, new, new=new.object)


def _place(mapped: Mapped) -> tuple[str, str, object]:
    return mapped.realm, mapped.topic, mapped.object["uuid"]


def _event(moment: datetime, about: Mapped, *, old: Object = _NOTHING, new: Object = _NOTHING) -> Event:
    key = str(about.object["uuid"])
    return Event(publisher_name=PUBLISHER, ts=moment, realm=about.realm, topic=about.topic, old=old, new=new, key=key)


def _view(mapping: Mapping, entry: Entry | None) -> Mapped | Unmatched:
    return Unmatched.IGNORE if entry is None else mapping.map(entry)


def _seen(view: Mapped | Unmatched) -> Mapped | None:
    return view if isinstance(view, Mapped) else None


def _complaints(view: Mapped | Unmatched, entry: Entry) -> tuple[str, ...]:
    """Why an entry is no object, or not a whole one."""
    if isinstance(view, Mapped):
        return view.problems
    if view is Unmatched.IGNORE:
        return ()
    return (f"no rule matches the object classes {', '.join(sorted(classes_of(entry))) or 'none'}",)


def _parked(message: Message, reason: str, position: int, max_payload: int) -> Output:
    now = datetime.now(UTC)
    letter = DeadLetter(
        reason=reason,
        origin=ORIGIN,
        subject=message.subject,
        data=message.data,
        failed_first=now,
        failed_last=now,
        headers=message.headers,
        position=message.sequence,
    )
    _, data, headers = fitted(letter, max_payload)
    return Output(position, True, data, headers, letter.id)
