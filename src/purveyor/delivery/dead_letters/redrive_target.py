"""Where a dead letter goes when it is put back, and as what. Pure.

| it was | it goes |
|---|---|
| in the queue of a subscription, or too large for it | to `<subscription>.retry`, with its position |
| a directory record that transform could not use | to its subject in `ldif`, behind what is there |
| a message of `incoming` that is no event, or that the pipeline fails on | to `incoming`, under a new position |
| a message for a stage | to the subject of that stage, under a new id that the inbox does not know |
| a request on `prefill` | there again |
| a broken LDIF record | nowhere: it has to be mended first |
"""

import re
from dataclasses import dataclass
from typing import Final

from purveyor.jetstream.headers import (
    CAME_ON,
    EVENT_ID,
    FAILED_FIRST,
    LETTER,
    MSG_ID,
    POSITION,
    RETRIES,
    Headers,
    first,
    number,
)
from purveyor.model.errors import InvalidName, Refused
from purveyor.model.event import SUBJECT
from purveyor.model.name_rules import check_subscription_name
from purveyor.model.registration import RecordState
from purveyor.queues.catalogue import LDIF, PREFILL, incoming, reserved_names, subscription_queue
from purveyor.queues.dead_letters.letter import CUT, LEFT_OUT, DeadLetter, subscription_origin
from purveyor.queues.dead_letters.store import Parked
from purveyor.queues.registry import Registered
from purveyor.queues.stage_queues import STAGE_STREAMS

_OF_SUBSCRIPTION: Final = re.compile(r"([A-Za-z0-9_-]{1,64})\.(main|prefill|retry)")
_OF_STAGE: Final = re.compile(r"stage\.(?P<endpoint>[A-Za-z0-9.-]+)\.\d+(\.interactive)?")
_INTAKE: Final = "intake"
_NEVER_THERE: Final = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A letter as the message that it becomes again. `subscription` is whose queue it goes to, if it is one's."""

    subject: str
    stream: str
    data: bytes
    headers: Headers
    msg_id: str
    subscription: str | None = None
    place: int = 0
    """By what it is ordered among others that go the same way."""


def way_back(parked: Parked) -> Way:
    """Where a letter goes; `Refused` with the reason and what to do instead, if there is no way.

    UnreadableRecord if a newer program parked it.
    """
    parked.check_understood()
    letter = parked.letter
    if letter is None:
        raise Refused(f"{parked.id} is no dead letter: {parked.problem}", fix="discard it, or read it with `dlq show`")
    name = subscription_of(letter)
    if CUT in letter.details:
        fix = f"write its events again: `purveyor subscription replay {name} --from ...`" if name else "send it again"
        raise Refused(f"dead letter {parked.id} lacks the end of its body, which was too large to be parked", fix=fix)
    if LEFT_OUT in letter.details:
        raise Refused(
            f"dead letter {parked.id} lacks headers of its message, which were too large to be parked",
            fix="send the message again",
        )
    if name is not None:
        return _to_subscription(parked, letter, name)
    if letter.origin == _INTAKE:
        raise Refused(
            f"dead letter {parked.id} is an LDIF record that cannot be read: {letter.reason}",
            fix=f"`purveyor dlq show {parked.id} --raw > record.ldif`, mend that, and `purveyor import record.ldif`",
        )
    for stream, subject in _sources(letter):
        if subject is not None:
            headers = _kept(letter.headers, ours=stream.startswith(STAGE_STREAMS))
            if stream == incoming().stream:
                headers |= _event_id(letter)
            return Way(
                subject=subject,
                stream=stream,
                data=letter.data,
                headers=_marked(parked, letter, headers),
                msg_id=put_back_id(parked, letter),
                place=letter.position or 0,
            )
    raise Refused(
        f"no part takes back what came on {letter.subject!r}", fix="publish it by hand, then discard the letter"
    )


def subscription_of(letter: DeadLetter) -> str | None:
    """The subscription whose message it was, or would have been; None if it is another part's."""
    lay = _OF_SUBSCRIPTION.fullmatch(letter.subject)
    name = lay[1] if lay else letter.origin
    try:
        check_subscription_name(name, reserved_names())
    except InvalidName:
        return None
    return name if lay or letter.subject.partition(".")[0] == SUBJECT else None


def origins_of(name: str) -> tuple[str, str]:
    """By what the letters of a subscription are told from others: given up in its queue, or too large for it."""
    return subscription_origin(name), name


def belongs_to(letter: DeadLetter, found: Registered) -> bool:
    """Whether a letter is that of a subscription, and not of another that had its name before."""
    if letter.origin not in origins_of(found.name) or subscription_of(letter) != found.name:
        return False
    told = letter.details.get("incarnation")
    if told is not None:
        return told == found.incarnation
    if letter.subject.partition(".")[0] == SUBJECT:
        return found.record.begin is not None and (letter.position or 0) > found.record.begin
    return letter.failed_last >= found.record.created


def check_takes_back(parked: Parked, found: Registered) -> None:
    """Refuse what is not a subscription's any more."""
    told = parked.letter.details.get("incarnation") if parked.letter is not None else None
    if found.record.state is not RecordState.ACTIVE:
        raise Refused(f"subscription {found.name!r} is not registered to the end", fix="add it again, as it was")
    if told is not None and told != found.incarnation:
        raise Refused(
            f"dead letter {parked.id} is of an earlier subscription {found.name!r}, which was deleted",
            fix="discard it; a replay writes events of the past to the new one",
        )


def put_back_id(parked: Parked, letter: DeadLetter) -> str:
    """The id of the message that a letter becomes: another than it had, and the same however often it is tried."""
    return f"{first(letter.headers, MSG_ID) or letter.id[:16]}~retry-{parked.id}"


def _to_subscription(parked: Parked, letter: DeadLetter, name: str) -> Way:
    """What lay in the queue keeps its headers; what did not get there gets those that it would have had."""
    lay = letter.subject.rpartition(".")[2] if _OF_SUBSCRIPTION.fullmatch(letter.subject) else _NEVER_THERE
    came_on = first(letter.headers, CAME_ON) or lay
    if letter.origin == name:
        headers = {**_kept(letter.headers, ours=False), **_event_id(letter), POSITION: (str(letter.position or 0),)}
    else:
        headers = dict(_kept(letter.headers, ours=True))
    return Way(
        subject=f"{name}.retry",
        stream=subscription_queue(name).stream,
        data=letter.data,
        headers={**_marked(parked, letter, headers), CAME_ON: (came_on,)},
        msg_id=put_back_id(parked, letter),
        subscription=name,
        place=number(headers, POSITION) or 0,
    )


def _sources(letter: DeadLetter) -> tuple[tuple[str, str | None], ...]:
    """The streams that take letters back, each with the subject for this one if it is theirs."""
    subject = letter.subject
    begin = subject.partition(".")[0]
    stage = _OF_STAGE.fullmatch(subject)
    endpoint = stage["endpoint"].replace(".", "_") if stage else ""
    return (
        (LDIF.stream, subject if begin == LDIF.name and begin != subject else None),
        # On its own subject it could stand for what transform has written last (`append_once` looks there).
        (incoming().stream, SUBJECT if begin == SUBJECT else None),
        (PREFILL.stream, subject if subject in PREFILL.subjects else None),
        (f"{STAGE_STREAMS}{endpoint}", subject if stage else None),
    )


def _kept(headers: Headers, *, ours: bool) -> dict[str, tuple[str, ...]]:
    """The headers that go along: never those of the server, ours only where they are what the reader goes by."""
    left_behind = ("nats-",) if ours else ("nats-", "purveyor-")
    return {name: values for name, values in headers.items() if not name.lower().startswith(left_behind)}


def _event_id(letter: DeadLetter) -> dict[str, tuple[str, ...]]:
    """The id that the event was published with."""
    identity = first(letter.headers, EVENT_ID) or first(letter.headers, MSG_ID)
    return {} if identity is None else {EVENT_ID: (identity,)}


def _marked(parked: Parked, letter: DeadLetter, headers: Headers) -> dict[str, tuple[str, ...]]:
    before = number(letter.headers, RETRIES) or 0
    return {
        **headers,
        LETTER: (str(parked.id),),
        RETRIES: (str(before + 1),),
        FAILED_FIRST: (letter.failed_first.isoformat(),),
    }
