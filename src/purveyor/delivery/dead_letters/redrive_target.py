"""The target of a redrive: where a dead letter goes back to, and as which message. Pure.

| the dead letter was | it goes back |
|---|---|
| in the queue of a subscription, or too large for it | to `<subscription>.retry`, with its position |
| a directory record that transform could not use | to its subject in `ldif`, behind other records |
| a message of `incoming` that is not an event, or that the pipeline fails on | to `incoming`, under a new position |
| a message for a stage | to the subject of that stage, under a new id that the inbox does not know |
| a job on `prefill` | to `prefill` |
| a broken LDIF record | nowhere: it has to be corrected first |
"""

import re
from dataclasses import dataclass
from typing import Final

from purveyor.delivery.subscription_jobs import not_registered
from purveyor.jetstream.headers import MSG_ID, POSITION, Headers, first, number
from purveyor.model.errors import InvalidName, Refused
from purveyor.model.event import SUBJECT
from purveyor.model.message_headers import DEAD_LETTER_SEQUENCE, EVENT_ID, FIRST_FAILED_AT, ORIGINAL_KIND, REDRIVE_COUNT
from purveyor.model.name_rules import check_subscription_name
from purveyor.model.registration import RecordState
from purveyor.queues.catalogue import LDIF, PREFILL, STAGE_STREAMS, incoming, reserved_names, subscription_queue
from purveyor.queues.dead_letters.letter import CUT_FROM_BYTES, HEADERS_LEFT_OUT, DeadLetter, subscription_origin
from purveyor.queues.dead_letters.store import ParkedMessage
from purveyor.queues.permissions import SOURCES
from purveyor.queues.registry import Registered

_SUBSCRIPTION_SUBJECT: Final = re.compile(r"([A-Za-z0-9_-]{1,64})\.(main|prefill|retry)")
_STAGE_SUBJECT: Final = re.compile(r"stage\.(?P<endpoint>[A-Za-z0-9.-]+)\.\d+(\.interactive)?")
_NEVER_QUEUED: Final = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveTarget:
    """The message that a dead letter becomes. `subscription` owns the queue; None for the queue of another part."""

    subject: str
    stream: str
    data: bytes
    headers: Headers
    msg_id: str
    subscription: str | None = None
    sort_position: int = 0
    """The order among dead letters with the same target."""


def redrive_target(parked: ParkedMessage) -> RedriveTarget:
    """Return the target of a dead letter; `Refused` with the reason and an alternative, if there is none.

    UnreadableRecord if a newer program parked it.
    """
    parked.check_understood()
    letter = parked.letter
    if letter is None:
        raise Refused(
            f"message {parked.id} cannot be redriven: {parked.problem}", fix="discard it, or read it with `dlq show`"
        )
    name = subscription_of(letter)
    if CUT_FROM_BYTES in letter.details:
        fix = f"write its events again: `purveyor subscription replay {name} --from ...`" if name else "send it again"
        raise Refused(f"dead letter {parked.id} lacks the end of its body, which was too large to be parked", fix=fix)
    if HEADERS_LEFT_OUT in letter.details:
        raise Refused(
            f"dead letter {parked.id} lacks headers of its message, which were too large to be parked",
            fix="send the message again",
        )
    if name is not None:
        return _to_subscription(parked, letter, name)
    if letter.origin == SOURCES:
        raise Refused(
            f"dead letter {parked.id} is an LDIF record that cannot be read: {letter.reason}",
            fix=f"`purveyor dlq show {parked.id} --raw > record.ldif`, correct it, and `purveyor import record.ldif`",
        )
    for stream, subject in _target_streams(letter):
        if subject is not None:
            headers = _forwarded_headers(letter.headers, ours=stream.startswith(STAGE_STREAMS))
            if stream == incoming().stream:
                headers |= _event_id(letter)
            return RedriveTarget(
                subject=subject,
                stream=stream,
                data=letter.data,
                headers=_with_redrive_headers(parked, letter, headers),
                msg_id=redrive_id(parked, letter),
                sort_position=letter.position or 0,
            )
    raise Refused(
        f"no queue accepts messages back on {letter.subject!r}", fix="publish it by hand, then discard the dead letter"
    )


def subscription_of(letter: DeadLetter) -> str | None:
    """Return the subscription that the message belongs to; None if it belongs to another part."""
    queued_on = _SUBSCRIPTION_SUBJECT.fullmatch(letter.subject)
    name = queued_on[1] if queued_on else letter.origin
    try:
        check_subscription_name(name, reserved_names())
    except InvalidName:
        return None
    return name if queued_on or letter.subject.partition(".")[0] == SUBJECT else None


def origins_of(name: str) -> tuple[str, str]:
    """Return the origins of a subscription's dead letters: given up in its queue, or too large for it."""
    return subscription_origin(name), name


def belongs_to(letter: DeadLetter, found: Registered) -> bool:
    """Return whether a dead letter belongs to a subscription, and not to an earlier one of the same name."""
    if letter.origin not in origins_of(found.name) or subscription_of(letter) != found.name:
        return False
    incarnation = letter.details.get("incarnation")
    if incarnation is not None:
        return incarnation == found.incarnation
    if letter.subject.partition(".")[0] == SUBJECT:
        return found.record.begin is not None and (letter.position or 0) > found.record.begin
    return letter.failed_last >= found.record.created


def check_accepts(parked: ParkedMessage, found: Registered) -> None:
    """Raise `Refused` if the subscription no longer accepts the dead letter."""
    incarnation = parked.letter.details.get("incarnation") if parked.letter is not None else None
    if found.record.state is not RecordState.ACTIVE:
        raise not_registered(found.name)
    if incarnation is not None and incarnation != found.incarnation:
        raise Refused(
            f"dead letter {parked.id} is of an earlier subscription {found.name!r}, which was deleted",
            fix="discard it; a replay delivers events of the past to the new subscription",
        )


def redrive_id(parked: ParkedMessage, letter: DeadLetter) -> str:
    """Return the id of the redriven message: not the original id, and the same for each attempt."""
    return f"{first(letter.headers, MSG_ID) or letter.id[:16]}~retry-{parked.id}"


def _to_subscription(parked: ParkedMessage, letter: DeadLetter, name: str) -> RedriveTarget:
    """Keep the headers of a message that was in the queue; build those of a message that was too large for it."""
    queued_on = letter.subject.rpartition(".")[2] if _SUBSCRIPTION_SUBJECT.fullmatch(letter.subject) else _NEVER_QUEUED
    came_on = first(letter.headers, ORIGINAL_KIND) or queued_on
    if letter.origin == name:
        headers = {
            **_forwarded_headers(letter.headers, ours=False),
            **_event_id(letter),
            POSITION: (str(letter.position or 0),),
        }
    else:
        headers = dict(_forwarded_headers(letter.headers, ours=True))
    return RedriveTarget(
        subject=f"{name}.retry",
        stream=subscription_queue(name).stream,
        data=letter.data,
        headers={**_with_redrive_headers(parked, letter, headers), ORIGINAL_KIND: (came_on,)},
        msg_id=redrive_id(parked, letter),
        subscription=name,
        sort_position=number(headers, POSITION) or 0,
    )


def _target_streams(letter: DeadLetter) -> tuple[tuple[str, str | None], ...]:
    """Return the streams that accept dead letters, each with the subject for this one if it belongs there."""
    subject = letter.subject
    begin = subject.partition(".")[0]
    stage = _STAGE_SUBJECT.fullmatch(subject)
    endpoint = stage["endpoint"].replace(".", "_") if stage else ""
    return (
        (LDIF.stream, subject if begin == LDIF.name and begin != subject else None),
        # On its own subject it could look like the last event that transform has written (`append_once` reads that).
        (incoming().stream, SUBJECT if begin == SUBJECT else None),
        (PREFILL.stream, subject if subject in PREFILL.subjects else None),
        (f"{STAGE_STREAMS}{endpoint}", subject if stage else None),
    )


def _forwarded_headers(headers: Headers, *, ours: bool) -> dict[str, tuple[str, ...]]:
    """Return the headers to keep: never those of the server, Purveyor's own only if the reader needs them."""
    left_behind = ("nats-",) if ours else ("nats-", "purveyor-")
    return {name: values for name, values in headers.items() if not name.lower().startswith(left_behind)}


def _event_id(letter: DeadLetter) -> dict[str, tuple[str, ...]]:
    """Return a header with the id that the event was published with."""
    identity = first(letter.headers, EVENT_ID) or first(letter.headers, MSG_ID)
    return {} if identity is None else {EVENT_ID: (identity,)}


def _with_redrive_headers(parked: ParkedMessage, letter: DeadLetter, headers: Headers) -> dict[str, tuple[str, ...]]:
    before = number(letter.headers, REDRIVE_COUNT) or 0
    return {
        **headers,
        DEAD_LETTER_SEQUENCE: (str(parked.id),),
        REDRIVE_COUNT: (str(before + 1),),
        FIRST_FAILED_AT: (letter.failed_first.isoformat(),),
    }
