"""A dead letter as JSON: the same from the command line and over HTTP."""

import base64
from datetime import datetime
from typing import Any

from purveyor.delivery.dead_letters.park import ATTEMPTS_LOG
from purveyor.delivery.dead_letters.service import Attempt, Report, attempts_of
from purveyor.jetstream.headers import Headers
from purveyor.queues.dead_letters.store import Parked


def summary(parked: Parked) -> dict[str, Any]:
    """A letter in a list."""
    letter = parked.letter
    return {
        "id": parked.id,
        "parked": _time(parked.at),
        "origin": parked.origin,
        "reason": parked.reason,
        "subject": None if letter is None else letter.subject,
        "attempts": None if letter is None else letter.attempts,
        "problem": parked.problem,
        "bytes": len(parked.data),
    }


def whole(parked: Parked) -> dict[str, Any]:
    """A letter with all that is known: the message as it was, its headers, and every attempt that was noted."""
    letter = parked.letter
    if letter is None:
        return {**summary(parked), "headers": _headers(parked.headers), **payload(parked.data)}
    return {
        **summary(parked),
        "headers": _headers(letter.headers),
        "sequence": letter.position,
        "failed_first": _time(letter.failed_first),
        "failed_last": _time(letter.failed_last),
        "attempts_log": [_attempt(each) for each in attempts_of(parked)],
        "details": {name: value for name, value in letter.details.items() if name != ATTEMPTS_LOG},
        **payload(parked.data),
    }


def report_json(report: Report) -> dict[str, Any]:
    """What came of dealing with many."""
    return {
        "chosen": report.chosen,
        "done": report.done,
        "gone": report.gone,
        "targets": report.targets,
        "failed": [{"id": each.id, "detail": each.message, "fix": each.fix} for each in report.failed],
    }


def payload(data: bytes) -> dict[str, str]:
    """Bytes as a field: text if they are text, else base64 under another name."""
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": base64.b64encode(data).decode()}


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "time": _time(attempt.time),
        "status": attempt.status,
        "error": attempt.error,
        "excerpt": attempt.excerpt,
    }


def _headers(headers: Headers) -> dict[str, list[str]]:
    return {name: [_readable(value) for value in values] for name, values in headers.items()}


def _readable(text: str) -> str:
    """What was not UTF-8 is marked: JSON has no bytes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
