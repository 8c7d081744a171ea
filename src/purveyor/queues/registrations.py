"""The registry's keys put together: what is known about each subscription, and what of it is not understood. Pure.

A part that this program does not understand (see `model.stored`) makes its subscription `Unreadable`. Everybody else
goes on. Of the record itself, `incarnation`, `begin` and `state` are read in any case: they mean the same in every
version, and tell where a subscription has to be stopped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput, UnreadableRecord
from purveyor.model.registration import (
    DISPATCH_STATE,
    PREFILL_STATE,
    RECORD,
    DispatchState,
    PrefillState,
    Record,
    RecordState,
    Suspension,
)
from purveyor.model.stored_record import UPGRADE, Kind

Value: TypeAlias = tuple[int, bytes | None]
"""A revision and what was written; None for a deletion."""
Parts: TypeAlias = Mapping[str, Value]
"""What is known under a name: by `definition`, `dispatch` and `prefill`."""
NOTHING: Final[Value] = (0, None)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """All that the registry knows about one subscription, each part with the revision to give when writing it."""

    record: Record
    revision: int
    dispatch: DispatchState | None = None
    dispatch_revision: int = 0
    prefill: PrefillState | None = None
    prefill_revision: int = 0

    @property
    def name(self) -> str:
        """Its name."""
        return self.record.name

    @property
    def incarnation(self) -> str:
        """Which of all subscriptions that ever had its name."""
        return self.record.incarnation

    @property
    def next(self) -> int | None:
        """The first position that may be written to its queue; None while it has no beginning."""
        if self.dispatch is not None:
            return self.dispatch.next
        return None if self.record.begin is None else self.record.begin + 1

    @property
    def suspended(self) -> Suspension | None:
        """Why nothing is written at present, if so."""
        return self.dispatch.suspended if self.dispatch is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A subscription that this program does not understand, or not all of it. It is not served, and left as it is."""

    name: str
    reason: str
    revision: int
    incarnation: str | None = None
    """None if even that cannot be read."""
    begin: int | None = None
    deleting: bool = False
    dispatch: DispatchState | None = None
    dispatch_revision: int = 0
    dispatch_unreadable: bool = False
    """Whether the dispatch state is (among) what is not understood: then nothing may be written there."""
    prefill_revision: int = 0
    dispatched: Registered | None = None
    """All that a dispatcher needs, if only the prefill state is not understood."""

    @property
    def suspended(self) -> Suspension | None:
        """Why nothing is written at present, if that is noted."""
        return self.dispatch.suspended if self.dispatch is not None else None

    def error(self) -> UnreadableRecord:
        """The error for whoever asks for it."""
        return UnreadableRecord(f"subscription {self.name!r} cannot be served: {self.reason}", fix=UPGRADE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All subscriptions at one moment of the registry, by name; `last_sequence` is that moment."""

    last_sequence: int = 0
    subscriptions: Mapping[str, Registered] = field(default_factory=dict)
    unreadable: Mapping[str, Unreadable] = field(default_factory=dict)
    """Those that are not understood. They stop no other."""
    parts: Mapping[str, Parts] = field(default_factory=dict, repr=False)

    @property
    def dispatched(self) -> Mapping[str, Registered]:
        """Those that a dispatcher understands: what a prefill state says is no concern of it."""
        more = {name: each.dispatched for name, each in self.unreadable.items() if each.dispatched is not None}
        return {**self.subscriptions, **more} if more else self.subscriptions


def assemble(name: str, parts: Parts) -> Registered | Unreadable | None:
    """The parts of one name together. A state of another incarnation counts as absent; its revision does not."""
    revision, data = parts.get("definition", NOTHING)
    if data is None:
        return None
    record, record_problem = _read(RECORD, data, lambda given: _named(name, Record.from_json(given)))
    dispatch_revision, data_of_dispatch = parts.get("dispatch", NOTHING)
    dispatch, dispatch_problem = _read(DISPATCH_STATE, data_of_dispatch, DispatchState.from_json)
    prefill_revision, data_of_prefill = parts.get("prefill", NOTHING)
    prefill, prefill_problem = _read(PREFILL_STATE, data_of_prefill, PrefillState.from_json)
    known = _known_fields(data)
    incarnation = known.get("incarnation")
    if dispatch is not None and incarnation not in (None, dispatch.incarnation):
        dispatch = None
    found = None
    if record is not None and dispatch_problem is None:
        found = Registered(
            record=record,
            revision=revision,
            dispatch=dispatch,
            dispatch_revision=dispatch_revision,
            prefill=prefill if prefill is not None and prefill.incarnation == record.incarnation else None,
            prefill_revision=prefill_revision,
        )
        if prefill_problem is None:
            return found
    return Unreadable(
        name=name,
        reason=record_problem or dispatch_problem or prefill_problem or "",
        revision=revision,
        incarnation=incarnation,
        begin=known.get("begin"),
        deleting=known.get("state") == RecordState.DELETING.value,
        dispatch=dispatch,
        dispatch_revision=dispatch_revision,
        dispatch_unreadable=dispatch_problem is not None,
        prefill_revision=prefill_revision,
        dispatched=found,
    )


def merge(snapshot: Snapshot, values: Mapping[str, Value]) -> Snapshot:
    """A snapshot with newer values. Only names that changed are parsed."""
    parts = dict(snapshot.parts)
    subscriptions, unreadable = dict(snapshot.subscriptions), dict(snapshot.unreadable)
    changed: dict[str, dict[str, Value]] = {}
    for key, value in values.items():
        name, _, part = key.rpartition(".")
        changed.setdefault(name, dict(parts.get(name, {})))[part] = value
    for name, known in changed.items():
        parts[name] = known
        subscriptions.pop(name, None)
        unreadable.pop(name, None)
        match assemble(name, known):
            case Registered() as found:
                subscriptions[name] = found
            case Unreadable() as found:
                unreadable[name] = found
            case None:
                pass
    last = max((revision for revision, _ in values.values()), default=0)
    return Snapshot(
        last_sequence=max(snapshot.last_sequence, last),
        subscriptions=dict(sorted(subscriptions.items())),
        unreadable=dict(sorted(unreadable.items())),
        parts=parts,
    )


def _read(kind: Kind, data: bytes | None, build: Callable[[Any], _T]) -> tuple[_T | None, str | None]:
    """A part, or why it is not understood; neither if it is not there."""
    if data is None:
        return None, None
    try:
        return kind.read(data, build), None
    except UnreadableRecord as error:
        return None, error.message


def _named(name: str, record: Record) -> Record:
    if record.name != name:
        raise InvalidInput(f"it is that of {record.name!r}")
    return record


def _known_fields(data: bytes) -> dict[str, Any]:
    """The fields of a record that every version has, as far as they are there."""
    try:
        given = json_fields.parse(data, RECORD.what)
    except InvalidInput:
        return {}
    incarnation, begin = given.get("incarnation"), given.get("begin")
    return {
        "incarnation": incarnation if isinstance(incarnation, str) and incarnation else None,
        "begin": begin if isinstance(begin, int) and not isinstance(begin, bool) and begin >= 0 else None,
        "state": given.get("state"),
    }
