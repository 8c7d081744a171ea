"""The subscriptions of the registry, assembled from its keys; also those that this program does not understand. Pure.

A part that this program does not understand (see `model.json_fields`) makes its subscription `Unreadable`; all other
subscriptions are served. Of the record itself, `incarnation`, `begin` and `state` are read in any case: they mean the
same in every version, and say where a subscription has to be suspended.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, TypeVar

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput, UnreadableRecord
from purveyor.model.json_fields import UPGRADE, Kind
from purveyor.model.registration import (
    DISPATCH_STATE,
    PREFILL_STATE,
    RECORD,
    UNKNOWN_INCARNATION,
    DispatchState,
    PrefillState,
    PrefillStatus,
    Record,
    RecordState,
    Suspension,
)

Value: TypeAlias = tuple[int, bytes | None]
"""A revision and the stored bytes; None for a deletion."""
Parts: TypeAlias = Mapping[str, Value]
"""The values of one subscription, by `definition`, `dispatch` and `prefill`."""
NO_VALUE: Final[Value] = (0, None)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A subscription in the registry, each part with the revision for its next write."""

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
        """Distinguishes it from other subscriptions that had or will have its name."""
        return self.record.incarnation

    @property
    def next(self) -> int | None:
        """The first position that may be written to its queue; None while its beginning is unknown."""
        if self.dispatch is not None:
            return self.dispatch.next
        return None if self.record.begin is None else self.record.begin + 1

    @property
    def suspended(self) -> Suspension | None:
        """Why the dispatcher writes nothing at present; None if it writes."""
        return self.dispatch.suspended if self.dispatch is not None else None

    @property
    def own_prefill(self) -> PrefillState | None:
        """The prefill without replays, which use the same state; None if no prefill was requested.

        A replay begins only after the prefill is done.
        """
        state = self.prefill
        if state is None or not state.is_replay:
            return state
        if not self.record.definition.request_prefill:
            return None
        return PrefillState(incarnation=state.incarnation, status=PrefillStatus.DONE, position=state.position)

    @property
    def replay(self) -> PrefillState | None:
        """The replay that runs, or ran last; None if there was none since the prefill."""
        return self.prefill if self.prefill is not None and self.prefill.is_replay else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A subscription that this program does not fully understand. It is not served, and not changed."""

    name: str
    reason: str
    revision: int
    incarnation: str | None = None
    """None if it cannot be read."""
    begin: int | None = None
    deleting: bool = False
    dispatch: DispatchState | None = None
    dispatch_revision: int = 0
    dispatch_unreadable: bool = False
    """Whether this program does not understand the dispatch state: then it must not write it."""
    prefill_revision: int = 0
    dispatched: Registered | None = None
    """The registration for a dispatcher, if only the prefill state is not understood."""

    @property
    def suspended(self) -> Suspension | None:
        """Why the dispatcher writes nothing at present, if that is stored."""
        return self.dispatch.suspended if self.dispatch is not None else None

    def error(self) -> UnreadableRecord:
        """Return the error for a caller that wants to use it."""
        return UnreadableRecord(f"subscription {self.name!r} cannot be served: {self.reason}", fix=UPGRADE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All subscriptions by name, as of the sequence `last_sequence` of the registry."""

    last_sequence: int = 0
    subscriptions: Mapping[str, Registered] = field(default_factory=dict)
    unreadable: Mapping[str, Unreadable] = field(default_factory=dict)
    """Those that this program does not understand. They do not stop others."""
    parts: Mapping[str, Parts] = field(default_factory=dict, repr=False)

    @property
    def dispatched(self) -> Mapping[str, Registered]:
        """Those that a dispatcher understands: it does not need the prefill state."""
        more = {name: each.dispatched for name, each in self.unreadable.items() if each.dispatched is not None}
        return {**self.subscriptions, **more} if more else self.subscriptions


def assemble(name: str, parts: Parts) -> Registered | Unreadable | None:
    """Assemble the parts of one name. A state of another incarnation counts as absent; its revision does not."""
    revision, data = parts.get("definition", NO_VALUE)
    if data is None:
        return None
    record, record_problem = _read(RECORD, data, lambda given: _named(name, Record.from_json(given)))
    dispatch_revision, data_of_dispatch = parts.get("dispatch", NO_VALUE)
    dispatch, dispatch_problem = _read(DISPATCH_STATE, data_of_dispatch, DispatchState.from_json)
    prefill_revision, data_of_prefill = parts.get("prefill", NO_VALUE)
    prefill, prefill_problem = _read(PREFILL_STATE, data_of_prefill, PrefillState.from_json)
    known = _known_fields(data)
    incarnation = known.get("incarnation")
    if dispatch is not None and incarnation not in (None, dispatch.incarnation):
        unknown = dispatch.incarnation == UNKNOWN_INCARNATION
        dispatch = replace(dispatch, incarnation=str(incarnation)) if unknown else None
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
    """Return a snapshot with newer values. Only changed names are parsed."""
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
    """Return a part, or why it is not understood; neither if it is absent."""
    if data is None:
        return None, None
    try:
        return kind.read(data, build), None
    except UnreadableRecord as error:
        return None, error.message


def _named(name: str, record: Record) -> Record:
    if record.name != name:
        raise InvalidInput(f"it is the record of {record.name!r}")
    return record


def _known_fields(data: bytes) -> dict[str, Any]:
    """Return the fields of a record that every version has."""
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
