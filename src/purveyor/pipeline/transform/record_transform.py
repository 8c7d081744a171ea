"""From a message of the queue `ldif` to its outputs: events, or a dead letter with the reason. Pure.

Every output has a position: the message's sequence times 2**20 plus its number among the outputs of that message. It is
the same however often a batch runs, so it identifies what was written already. A message can give both events and a
dead letter: an entry that was an object and no longer is one is deleted for its subscribers, and parked for operators.
"""

import uuid
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from purveyor.jetstream.headers import Headers
from purveyor.model.errors import InvalidInput, PurveyorError, describe
from purveyor.model.event import Event, encode_checked
from purveyor.model.message_headers import PREFILL_PUBLISHER
from purveyor.pipeline.transform.directory_records import InvalidRecord
from purveyor.pipeline.transform.directory_rules import Entry, EntryChange, Published, apply_record
from purveyor.pipeline.transform.live_directory import LiveDirectory
from purveyor.pipeline.transform.live_records import InvalidEntry, LiveRecord, parse_message
from purveyor.pipeline.transform.live_rules import PartlyApplied, apply_live_record, note_invalid
from purveyor.pipeline.transform.mapping import MappedObject, Mapping, Unmatched, object_classes
from purveyor.queues.dead_letters.letter import DeadLetter, fit_letter

ORIGIN: Final = "transform"
POSITION_BITS: Final = 20
HEADER_RESERVE_BYTES: Final = 1024
"""Bytes left for the headers of an event."""
Object: TypeAlias = MappingOf[str, Any]
_NO_OBJECT: Final[Object] = {}
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
        """An id that no other message has, in this stream or an earlier one of the same name."""
        return f"{self.subject}:{self.sequence}:{int(self.stored.timestamp() * 1_000_000)}"


@dataclass(frozen=True, slots=True)
class Output:
    """A message to write: an event, or a dead letter."""

    position: int
    parked: bool
    data: bytes
    headers: Headers
    msg_id: str


@dataclass(frozen=True, slots=True)
class TransformRules:
    """The rules outside of the directory."""

    mapping: Mapping
    max_payload: int
    """The size of the largest message that the server takes."""


def transform(directory: LiveDirectory, rules: TransformRules, message: Message) -> list[Output]:
    """Apply a message to the directory and return its outputs.

    A message on which these rules fail unexpectedly is parked as well, and the directory is as it was before: another
    attempt would fail in the same way and hold back everything behind it. An outage, or an error of the store, is not
    the fault of the message.
    """
    directory.begin()
    try:
        changes, problems = _apply(directory, message)
        return list(_outputs(directory, rules, message, changes, problems))
    except (MemoryError, OSError):
        raise
    except Exception as error:
        if isinstance(error, PurveyorError) and not isinstance(error, InvalidInput):
            raise
        directory.undo()
        reason = f"the transform fails on it: {describe(error)}"
        return [_parked(message, reason, message.sequence << POSITION_BITS, rules.max_payload)]


def _apply(directory: LiveDirectory, message: Message) -> tuple[Sequence[EntryChange], Sequence[str]]:
    """Return the changes of a message, and why it has none or not all of them."""
    try:
        record = parse_message(message.data)
    except InvalidRecord as error:
        note_invalid(directory, error)
        return (), [str(error)]
    try:
        if isinstance(record, LiveRecord):
            return apply_live_record(directory, record), ()
        return apply_record(directory, record, str(uuid.uuid5(_NAMESPACE, message.origin))), ()
    except PartlyApplied as error:
        return error.changes, [str(error)]
    except InvalidRecord as error:
        directory.undo()
        if isinstance(error, InvalidEntry):
            note_invalid(directory, error)
        return (), [str(error)]


def _outputs(
    directory: LiveDirectory,
    rules: TransformRules,
    message: Message,
    changes: Sequence[EntryChange],
    unfit: Sequence[str],
) -> Iterator[Output]:
    problems = list(unfit)
    number = message.sequence << POSITION_BITS
    prefilled_by = rules.mapping.prefill_publisher
    headers: Headers = {} if prefilled_by is None else {PREFILL_PUBLISHER: (prefilled_by,)}
    noted: dict[str, Entry] = {}
    """By uuid: entries after the message with notes that the directory does not have yet."""
    for nth, change in enumerate(changes):
        before = None if change.before is None else noted.pop(change.before.uuid, change.before)
        after = _with_members(directory, rules.mapping, before, change.after)
        has = before if before is None or before.published is None else before.published.entry
        old, new = (_view(rules.mapping, entry) for entry in (has, after))
        if nth == 0 and after is not None:  # the first change is that of the message's own entry
            problems += _problems_of(new, after)
        for event in events(_seen(old), _seen(new), message.stored, rules.mapping.publisher):
            data = _encode(event, rules.max_payload, problems)
            if data is None:
                break
            identity = f"{message.origin}:{number - (message.sequence << POSITION_BITS)}"
            yield Output(number, False, data, headers, identity)
            number += 1
            has = after if event.new else None
        else:
            has = after
        if after is not None:
            after = after if has is after else after._replace(published=Published(has))
            if after != change.after:
                noted[after.uuid] = after
    for entry in noted.values():
        directory.replace(entry)
    if problems:
        yield _parked(message, "; ".join(dict.fromkeys(problems)), number, rules.max_payload)


def _with_members(
    directory: LiveDirectory, mapping: Mapping, before: Entry | None, after: Entry | None
) -> Entry | None:
    """Note in a group what its members are now: `old` of its next event is what is published now."""
    if after is None:
        return None
    known = {} if before is None or before.member_kinds is None else before.member_kinds
    return after._replace(published=None, member_kinds=mapping.member_kinds(after, known, directory.get))


def _encode(event: Event, max_payload: int, problems: list[str]) -> bytes | None:
    """Return an event as it is stored; add a problem and return None if it cannot be."""
    try:
        data = encode_checked(event)
    except InvalidInput as error:
        problems.append(str(error))
        return None
    if len(data) + HEADER_RESERVE_BYTES > max_payload:
        problems.append(f"an event of {len(data)} bytes is more than a message can hold")
        return None
    return data


def events(old: MappedObject | None, new: MappedObject | None, moment: datetime, publisher: str) -> Iterator[Event]:
    """Yield the events of a change: none if subscribers see no difference."""
    if old is not None and new is not None and _object_identity(old) == _object_identity(new):
        if old.object != new.object:
            yield _event(new, moment, publisher, old=old.object, new=new.object)
        return
    if old is not None:
        yield _event(old, moment, publisher, old=old.object)
    if new is not None:
        yield _event(new, moment, publisher, new=new.object)


def _object_identity(mapped: MappedObject) -> tuple[str, str, object]:
    return mapped.realm, mapped.topic, mapped.object["uuid"]


def _event(
    about: MappedObject, moment: datetime, publisher: str, *, old: Object = _NO_OBJECT, new: Object = _NO_OBJECT
) -> Event:
    return Event(
        publisher_name=publisher,
        ts=moment,
        realm=about.realm,
        topic=about.topic,
        old=old,
        new=new,
        key=str(about.object["uuid"]),
    )


def _view(mapping: Mapping, entry: Entry | None) -> MappedObject | Unmatched:
    return Unmatched.IGNORE if entry is None else mapping.map(entry)


def _seen(view: MappedObject | Unmatched) -> MappedObject | None:
    return view if isinstance(view, MappedObject) else None


def _problems_of(view: MappedObject | Unmatched, entry: Entry) -> tuple[str, ...]:
    """Return why an entry is not an object, or not a complete one."""
    if isinstance(view, MappedObject):
        return view.problems
    if view is Unmatched.IGNORE:
        return ()
    return (f"no rule matches the object classes {', '.join(sorted(object_classes(entry))) or 'none'}",)


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
    _, data, headers = fit_letter(letter, max_payload)
    return Output(position, True, data, headers, letter.id)
