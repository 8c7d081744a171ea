"""Rows of the outbox that no attempt can send, and the dead letters that they become. Pure."""

import json
from datetime import datetime
from typing import Any, Final

from purveyor.jetstream.api_errors import HEADERS_TOO_LARGE, MESSAGE_TOO_LARGE
from purveyor.jetstream.headers import MSG_ID
from purveyor.model.errors import InvalidConfig, InvalidInput, PublishRefused, PurveyorError
from purveyor.queues.dead_letters.letter import DeadLetter
from purveyor.stages.flow import Outgoing, check_sendable
from purveyor.stages.statement_protocol import Row

ORIGIN: Final = "outbox"
"""The origin of the dead letters that a relay writes."""
_LONGEST_QUOTE: Final = 1000


def is_for_good(error: PurveyorError) -> bool:
    """Whether the same message will be refused whenever it is sent."""
    too_large = isinstance(error, PublishRefused) and error.err_code in (MESSAGE_TOO_LARGE, HEADERS_TOO_LARGE)
    return too_large or (isinstance(error, InvalidInput) and not isinstance(error, InvalidConfig))


def letter_of(row: Row, error: PurveyorError, max_payload: int, now: datetime) -> DeadLetter:
    """The dead letter that a row becomes after that error."""
    headers = _headers(row)
    return DeadLetter(
        reason=_reason(row, headers, max_payload) or error.message,
        origin=ORIGIN,
        subject=row.subject[:_LONGEST_QUOTE],
        data=row.data,
        failed_first=now,
        failed_last=now,
        headers={**{name: (str(value),) for name, value in headers.items()}, MSG_ID: (row.message_id,)},
        position=row.id,
        details={"key": row.key and row.key[:_LONGEST_QUOTE], "message_id": row.message_id[:_LONGEST_QUOTE]},
    )


def _headers(row: Row) -> dict[str, Any]:
    try:
        return dict(json.loads(row.headers))
    except (ValueError, TypeError):
        return {"unreadable": row.headers}


def _reason(row: Row, headers: dict[str, Any], max_payload: int) -> str | None:
    """What is wrong with the message by our own rules, which name the part of it; None if nothing is."""
    try:
        check_sendable(Outgoing(row.message_id, row.subject, row.data, headers, row.key), max_payload)
    except PurveyorError as error:
        return error.message
    except TypeError:
        return "the value of a header is no text"
    return None
