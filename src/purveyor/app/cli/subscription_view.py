"""A subscription as `purveyor subscription` prints it: as JSON and as text."""

import json
from datetime import UTC, datetime, timedelta

from purveyor.app.cli.render import format_block, format_time
from purveyor.delivery.push.push_reports import PushProblem
from purveyor.delivery.subscriptions import SubscriptionStatus
from purveyor.model.ack_ranges import Expired
from purveyor.model.delivery_policy import DEFAULT_HIDDEN_FIELDS, AfterDeadLetter
from purveyor.model.json_fields import UPGRADE
from purveyor.model.subscription import Subscription
from purveyor.queues.registry import PrefillState, Registered, Suspension, Unreadable


def describe_state(found: Registered, push_problem: PushProblem | None = None) -> str:
    """Return the most urgent state in one word."""
    if found.suspended is not None:
        return "suspended"
    if found.record.paused:
        return "paused"
    return "stuck" if push_problem is not None else found.record.state.value


def registered_json(found: Registered, push_problem: PushProblem | None = None) -> dict[str, object]:
    """Return a registered subscription, with its push problem, for JSON."""
    record = found.record
    return {
        **record.definition.to_public_json(),
        "incarnation": record.incarnation,
        "state": record.state.value,
        "paused": record.paused,
        **({} if record.pause_reason is None else {"pause_reason": record.pause_reason}),
        **({} if push_problem is None else {"push_trouble": push_problem.to_json()}),
        "created": record.created,
        "begin": record.begin,
        "suspended": found.suspended.to_json() if found.suspended else None,
        "prefill": found.prefill.to_json() if found.prefill else None,
    }


def unreadable_json(found: Unreadable) -> dict[str, object]:
    """Return a subscription whose record this version cannot read, for JSON."""
    return {
        "name": found.name,
        "incarnation": found.incarnation,
        "state": "unreadable",
        "unreadable": found.reason,
        "fix": UPGRADE,
        "begin": found.begin,
        "suspended": found.suspended.to_json() if found.suspended else None,
    }


def unreadable_text(found: Unreadable) -> str:
    """Return a subscription whose record this version cannot read, as text."""
    rows: list[tuple[str, object]] = [
        ("State", "unreadable: this version neither delivers nor changes it"),
        ("Reason", found.reason),
        ("What to do", UPGRADE),
        ("Begins after", found.begin),
        *_suspended_rows(found.suspended),
    ]
    return format_block(f"Subscription {found.name}", rows)


def status_json(found: SubscriptionStatus) -> dict[str, object]:
    """Return the status of a subscription for JSON."""
    waiting = {"main": found.main, "prefill": found.prefill, "retry": found.retry}
    return {
        **registered_json(found.registered, found.push_problem),
        "position": found.position,
        "backlog": None if found.main is None else waiting,
        "expired": expired_json(found.expired),
        **({} if found.unreadable is None else {"unreadable": found.unreadable}),
    }


def expired_json(expired: Expired) -> dict[str, object] | None:
    """Return the expired messages for JSON; None if there are none."""
    if not expired.count:
        return None
    last = datetime.fromtimestamp(expired.at / 1000, UTC)
    return {"count": expired.count, "position": expired.position or None, "last": last}


def status_text(found: SubscriptionStatus) -> str:
    """Return the status of a subscription as text."""
    record, suspended = found.registered.record, found.registered.suspended
    wanted, hidden = record.definition.filter, record.definition.hidden_fields
    filters = [f"{name} = {' or '.join(values)}" for name, values in wanted.attributes.items()]
    filters += [f"{path} = {' or '.join(map(json.dumps, values))}" for path, values in wanted.fields.items()]
    rows: list[tuple[str, object]] = [
        ("Topics", [f"{topic.realm}:{topic.topic}" for topic in record.definition.realms_topics]),
        *([("Only", filters)] if filters else []),
        *([("Hidden", list(hidden) or "nothing")] if hidden != DEFAULT_HIDDEN_FIELDS else []),
        *push_rows(record.definition),
        ("State", describe_state(found.registered, found.push_problem)),
        *([] if record.pause_reason is None else [("Pause reason", record.pause_reason)]),
        *([] if found.push_problem is None else [("Push problem", found.push_problem.reason)]),
        ("Created", record.created),
        ("Begins after", record.begin),
        ("Dispatched up to", found.position),
        ("Waiting", "no queue" if found.main is None else _waiting_text(found)),
        ("Prefill", prefill_text(found.registered.prefill)),
    ]
    if record.definition.retention_seconds is not None:
        rows.append(("Kept for", timedelta(seconds=record.definition.retention_seconds)))
    if found.expired.count:
        rows.append(("Expired", _expired_text(found.expired)))
    if found.unreadable is not None:
        rows.append(("Unreadable", found.unreadable))
    return format_block(f"Subscription {record.name}", [*rows, *_suspended_rows(suspended)])


def _suspended_rows(suspended: Suspension | None) -> list[tuple[str, object]]:
    if suspended is None:
        return []
    return [("Suspended", f"at position {suspended.position}: {suspended.reason}"), ("Since", suspended.at)]


def push_rows(definition: Subscription) -> list[tuple[str, object]]:
    """Return the rows of the push settings; none for a pull subscription."""
    push, retry = definition.push, definition.retry
    if push is None:
        return []
    order = "none" if definition.order_by is None else definition.order_by.value
    signed = "no" if push.secret is None else "yes" if push.old_secret is None else "with two secrets"
    until = "for ever" if retry.max_attempts is None else f"up to {retry.max_attempts} times"
    rows: list[tuple[str, object]] = [
        ("Pushed to", list(push.endpoints)),
        ("Format", push.format.value),
        ("Acknowledged by", push.ack_codes.value),
        ("Within", timedelta(seconds=push.ack_deadline_seconds)),
        ("Tried", f"{until}, after {retry.min_backoff_seconds:g} to {retry.max_backoff_seconds:g} s"),
        ("Order", order),
        ("Signed", signed),
    ]
    if push.old_secret_until is not None:
        rows.append(("Old secret until", push.old_secret_until))
    if push.bearer_token is not None:
        rows.append(("Bearer token", "yes"))
    if push.after_dead_letter is not AfterDeadLetter.CONTINUE:
        rows.append(("After a dead letter", push.after_dead_letter.value))
    return rows


def _expired_text(expired: Expired) -> str:
    last = datetime.fromtimestamp(expired.at / 1000, UTC)
    return f"{expired.count} unacknowledged messages, the last on {format_time(last)}"


def _waiting_text(found: SubscriptionStatus) -> str:
    put_back = f", {found.retry} put back" if found.retry else ""
    return f"{found.main} live, {found.prefill} of the prefill{put_back}"


def prefill_text(state: PrefillState | None) -> str:
    """Describe the progress of a prefill."""
    if state is None:
        return "none"
    of = f" of {state.total}" if state.total is not None else ""
    reason = f": {state.reason}" if state.reason else ""
    return f"{state.status.value}, {state.written}{of} written, attempt {state.attempt}, as of {state.position}{reason}"
