"""Dead letters as JSON, for the command line and the HTTP API."""

import base64
from datetime import datetime
from typing import Any

from purveyor.delivery.dead_letters.park import ATTEMPTS_LOG, Attempt, attempts_of
from purveyor.delivery.dead_letters.service import Report
from purveyor.jetstream.headers import Headers
from purveyor.queues.dead_letters.store import ParkedMessage


def dead_letter_summary(parked: ParkedMessage) -> dict[str, Any]:
    """Return a dead letter for a list."""
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


def dead_letter_details(parked: ParkedMessage) -> dict[str, Any]:
    """Return a dead letter with its original message, headers and recorded attempts."""
    letter = parked.letter
    if letter is None:
        return {**dead_letter_summary(parked), "headers": _headers(parked.headers), **payload(parked.data)}
    return {
        **dead_letter_summary(parked),
        "headers": _headers(letter.headers),
        "sequence": letter.position,
        "failed_first": _time(letter.failed_first),
        "failed_last": _time(letter.failed_last),
        "attempts_log": [_attempt(each) for each in attempts_of(parked)],
        "details": {name: value for name, value in letter.details.items() if name != ATTEMPTS_LOG},
        **payload(parked.data),
    }


def report_json(report: Report) -> dict[str, Any]:
    """Return the result of a retry or discard."""
    return {
        "chosen": report.chosen,
        "done": report.done,
        "gone": report.gone,
        "targets": report.targets,
        "failed": [{"id": each.id, "detail": each.message, "fix": each.fix} for each in report.failed],
    }


def payload(data: bytes) -> dict[str, str]:
    """Return a body as the field `data` if it is text, else as `data_base64`."""
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
    """Replace bytes that are not UTF-8: JSON cannot hold them."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
