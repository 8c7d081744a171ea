"""What the server's answers mean to `append_once`: how far a target was written, and what to do about a refusal. Pure.

Refusals are judged here and acted on elsewhere. The server checks what is expected of a batch before it looks for known
message ids, so a conflict always shows as one; and a row too large for the stream shows as an incomplete batch, unless
it is the last. So what a batch cannot explain is tried with fewer rows: a single one is refused with its own reason.
"""

import base64
import json
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from purveyor.jetstream import headers
from purveyor.jetstream.api_errors import (
    FIXES,
    MESSAGE_NOT_FOUND,
    MESSAGE_TOO_LARGE,
    STREAM_NOT_FOUND,
    STREAM_SEALED,
    WRONG_LAST_SEQUENCE,
    WRONG_LAST_SEQUENCE_UNKNOWN,
)
from purveyor.jetstream.bulk.append.types import RefusalKind, Target
from purveyor.jetstream.bulk.publish.acks import NO_RESPONDERS, status_of
from purveyor.jetstream.bulk.publish.acks import Refusal as Answer
from purveyor.jetstream.config import INCARNATION
from purveyor.model.ack_ranges import DELIVERY_STATE

QUESTION: Final = "$JS.API.STREAM.MSG.GET."
"""Where the newest message of a subject is asked for, with the name of its stream behind it."""

ABOUT: Final = "$JS.API.STREAM.INFO."
"""Where a stream is asked whose it is, with its name behind it."""

_DENIED: Final = re.compile(r'Permissions Violation for Publish to "([^"]+)"', re.IGNORECASE)
_WRONG_LAST_ID: Final = 10070
_NOT_ATOMIC: Final = 10174
_STORE_FAILED: Final = 10077
_WRONG_STREAM: Final = 10060
# Resources of the account, of the server, memory, storage; and what the store itself says, its limits above all.
_FULL: Final = frozenset({10002, 10023, 10028, 10047, _STORE_FAILED})
_STRANGE: Final = Answer(0, 0, "the answer is none that JetStream gives")


class Verdict(Enum):
    """What to do about a refusal."""

    ASK_AGAIN = auto()
    """Somebody else wrote, or what was newest is deleted: ask how far it is written."""
    WAIT = auto()
    """It may work later."""
    FEWER = auto()
    """Try with fewer rows, to find out which one it is about."""
    GIVE_UP = auto()


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest message of a subject; sequence 0 if there is none."""

    sequence: int = 0
    position: int | None = None
    """None if it carries none: somebody else wrote it."""


KNOWN: Final = Answer(400, _WRONG_LAST_ID, "the stream knew this row before")
"""Not the server's words: a row in a chain was not stored, because it was there once."""


def is_conflict(answer: Answer) -> bool:
    """Whether the stream is not as it was expected to be."""
    return answer.err_code in (WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_UNKNOWN, _WRONG_LAST_ID)


def judge(answer: Answer, rows: int) -> tuple[Verdict, RefusalKind]:
    """What to do when so many rows were refused at once, and the kind of refusal if nothing can be done.

    No rows: a question was refused.
    """
    code = answer.err_code
    if is_conflict(answer):
        return Verdict.ASK_AGAIN, RefusalKind.OTHER
    closing = code == _STORE_FAILED and "closed" in answer.reason  # a server on its way down
    if answer.nobody_there and rows:
        return Verdict.ASK_AGAIN, RefusalKind.OTHER  # its leader, if there is one, will answer
    if answer.temporary or answer.nobody_there or closing:
        return Verdict.WAIT, RefusalKind.OTHER
    if code == STREAM_NOT_FOUND:
        return Verdict.GIVE_UP, RefusalKind.MISSING_STREAM
    if code in _FULL:
        return Verdict.GIVE_UP, RefusalKind.FULL
    if code in (_NOT_ATOMIC, STREAM_SEALED, _WRONG_STREAM):
        return Verdict.GIVE_UP, RefusalKind.OTHER
    if rows > 1:
        return Verdict.FEWER, RefusalKind.OTHER
    return Verdict.GIVE_UP, RefusalKind.TOO_LARGE if code == MESSAGE_TOO_LARGE else RefusalKind.OTHER


def in_words(answer: Answer) -> str:
    """The reason of a refusal, with what to do about it where that is known."""
    fix = FIXES.get(answer.err_code)
    return f"{answer.reason} ({fix})" if fix else answer.reason


def denied_subject(said: str) -> str | None:
    """The subject that the server does not let us publish to, by its words; None if they are about something else."""
    found = _DENIED.search(said)
    return found[1] if found else None


def question(subject: str) -> bytes:
    """The question for the newest message of a subject."""
    return json.dumps({"last_by_subj": subject}).encode()


def read_message(header_block: bytes, payload: bytes) -> dict[str, Any] | Answer | None:
    """The answer to `STREAM.MSG.GET`: a message as the server describes it, None if there is none, or a refusal."""
    body = _body(header_block, payload)
    if isinstance(body, Answer):
        return None if body.err_code == MESSAGE_NOT_FOUND else body
    message = body.get("message")
    return message if isinstance(message, dict) else _STRANGE


def _body(header_block: bytes, payload: bytes) -> dict[str, Any] | Answer:
    """The JSON of an answer, or the refusal that it is."""
    status, words = status_of(header_block)
    if status:
        return Answer(status, 0, words or ("no responders" if status == NO_RESPONDERS else "no reason given"))
    try:
        body: dict[str, Any] = json.loads(payload)
        error = body.get("error")
        if error is None:
            return body
        return Answer(int(error.get("code", 0)), int(error.get("err_code", 0)), str(error.get("description", "")))
    except (ValueError, TypeError, AttributeError):
        return _STRANGE


def read_stream(header_block: bytes, payload: bytes) -> tuple[str | None, int] | Answer:
    """The answer to `STREAM.INFO`: the stream's owner, if it names one, and its last sequence; or a refusal."""
    body = _body(header_block, payload)
    if isinstance(body, Answer):
        return body
    try:
        return (body["config"].get("metadata") or {}).get(INCARNATION), int(body["state"]["last_seq"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return _STRANGE


def newest(message: dict[str, Any] | None, header: str) -> Newest:
    """Sequence and position of a message."""
    if message is None:
        return Newest()
    block = headers.decode(base64.b64decode(message.get("hdrs", "")))
    return Newest(int(message["seq"]), as_position(headers.first(block.headers, header)))


def as_position(value: str | None) -> int | None:
    """A position out of a header; None if it is not there or is none."""
    return int(value) if value is not None and value.isascii() and value.isdigit() else None


def floor(message: dict[str, Any] | None, target: Target) -> int:
    """The position that a floor's message names. A floor that cannot be understood is a `ValueError`.

    UnreadableRecord if it is a delivery state of a newer program: what was acknowledged would be written again.
    """
    if message is None or not message.get("data"):
        return 0  # none yet, or a key that was deleted
    try:
        body = json.loads(base64.b64decode(message["data"]))
        DELIVERY_STATE.check_version(body)
        if target.floor_tag is not None and body.get("incarnation") != target.floor_tag:
            return 0
        return int(body["position"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the message on {target.floor_subject} names no position") from error
