"""The dead letters of stages: of messages that a stage gives up, and of outbox rows that cannot be sent. Pure."""

import json
import traceback
from datetime import UTC, datetime
from typing import Any, Final

from purveyor.jetstream.api import HEADERS_TOO_LARGE, MESSAGE_TOO_LARGE
from purveyor.jetstream.headers import MSG_ID, Headers, first
from purveyor.model.errors import InvalidConfig, InvalidInput, PublishRefused, PurveyorError
from purveyor.queues.dead_letters.letter import LAST_ERROR, DeadLetter, fit_letter
from purveyor.stages.endpoint import Stage
from purveyor.stages.flow import Outgoing, check_sendable
from purveyor.stages.handler_types import Refuse
from purveyor.stages.source import Incoming
from purveyor.stages.sql_statements import Failures, Row

OUTBOX_ORIGIN: Final = "outbox"
"""The origin of the dead letters that a relay writes."""
_MAX_QUOTE_CHARACTERS: Final = 1000
_MAX_TRACEBACK_CHARACTERS: Final = 4000


def message_dead_letter(
    stage: Stage, message: Incoming, error: Exception, failures: Failures | None, now: datetime
) -> DeadLetter:
    """Return the dead letter of a message that a stage gives up."""
    return DeadLetter(
        reason=error.message if isinstance(error, Refuse) else describe_error(error),
        origin=f"stage:{stage.id}",
        subject=message.subject,
        data=message.data,
        failed_first=now if failures is None else datetime.fromtimestamp(failures.first_ms / 1000, UTC),
        failed_last=now,
        headers=message.headers,
        position=message.sequence,
        attempts=message.deliveries if failures is None else failures.attempts,
        details={
            "endpoint": stage.endpoint,
            "stage": stage.number,
            "traceback": "".join(traceback.format_exception(error))[-_MAX_TRACEBACK_CHARACTERS:],
        },
    )


def row_dead_letter(row: Row, error: PurveyorError, max_payload: int, now: datetime) -> DeadLetter:
    """Return the dead letter of an outbox row after a permanent error."""
    headers = _row_headers(row)
    return DeadLetter(
        reason=_rule_violation(row, headers, max_payload) or error.message,
        origin=OUTBOX_ORIGIN,
        subject=row.subject[:_MAX_QUOTE_CHARACTERS],
        data=row.data,
        failed_first=now,
        failed_last=now,
        headers={**{name: (str(value),) for name, value in headers.items()}, MSG_ID: (row.message_id,)},
        position=row.id,
        details={
            "key": row.key and row.key[:_MAX_QUOTE_CHARACTERS],
            "message_id": row.message_id[:_MAX_QUOTE_CHARACTERS],
        },
    )


def to_outgoing(letter: DeadLetter, max_payload: int) -> Outgoing:
    """Return a dead letter as a message for the outbox, cut to fit the server's limit."""
    subject, data, headers = fit_letter(letter, max_payload)
    plain = {name: first(headers, name) or "" for name in headers if name != MSG_ID}
    return Outgoing(letter.id, subject, data, plain)


def stored_headers(row: Row) -> Headers:
    """Return the headers of a row as the queue has them."""
    return {name: (str(value),) for name, value in _row_headers(row).items()}


def failed_before(headers: Headers, moment: datetime) -> bool:
    """Whether a dead letter was written before a time; True if that cannot be read."""
    try:
        return datetime.fromisoformat(first(headers, LAST_ERROR) or "") < moment
    except (ValueError, TypeError):
        return True


def is_permanent(error: PurveyorError) -> bool:
    """Whether the server refuses the same message at every attempt."""
    too_large = isinstance(error, PublishRefused) and error.err_code in (MESSAGE_TOO_LARGE, HEADERS_TOO_LARGE)
    return too_large or (isinstance(error, InvalidInput) and not isinstance(error, InvalidConfig))


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error."""
    return f"{type(error).__name__}: {error}"


def _row_headers(row: Row) -> dict[str, Any]:
    try:
        return dict(json.loads(row.headers))
    except (ValueError, TypeError):
        return {"unreadable": row.headers}


def _rule_violation(row: Row, headers: dict[str, Any], max_payload: int) -> str | None:
    """Return what is wrong with a row by our own rules, which name the part of it; None if nothing is."""
    try:
        check_sendable(Outgoing(row.message_id, row.subject, row.data, headers, row.key), max_payload)
    except PurveyorError as error:
        return error.message
    except TypeError:
        return "the value of a header is no text"
    return None
