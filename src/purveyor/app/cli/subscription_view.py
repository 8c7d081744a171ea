"""A subscription as `purveyor subscription` prints it as text, from the JSON of `purveyor.app.subscription_details`."""

import json
from datetime import timedelta

from purveyor.app.cli.render import format_block, format_duration, format_time, read_time
from purveyor.model.delivery_policy import (
    DEFAULT_HIDDEN_FIELDS,
    DEFAULT_LEASE_SECONDS,
    AfterDeadLetter,
    Delivery,
    RetryPolicy,
)
from purveyor.model.json_fields import Json
from purveyor.model.retries import describe_progress
from purveyor.model.subscription import Subscription

_MAX_LISTED_LEASES = 10
_SECRETS = ("secret", "old_secret", "old_secret_until", "bearer_token")
_OPTIONS = (
    "name",
    "realms_topics",
    "request_prefill",
    "filter",
    "hidden_fields",
    "delivery",
    "order_by",
    "lease_seconds",
    "retry",
    "retention_seconds",
)

Rows = list[tuple[str, object]]


def describe_state(found: Json) -> str:
    """Return the most urgent state in one word."""
    if found["state"] == "unreadable":
        return "unreadable"
    if found["suspended"]:
        return "suspended"
    if found["paused"]:
        return "paused"
    problem = found.get("push_trouble")
    return str(found["state"]) if not problem else _problem_word(problem)


def describe_problem(found: Json) -> str:
    """Return why push sends nothing, in one line."""
    problem = found["push_trouble"]
    about = [problem["reason"], *map(_progress_at, problem["endpoints"])]
    return f"{found['name']} has been {_problem_word(problem)} since {_time(problem['since'])}: {'; '.join(about)}"


def topic_labels(found: Json) -> list[str]:
    """Return the topics of a subscription; none if its record is unreadable."""
    return [f"{each['realm']}:{each['topic']}" for each in found.get("realms_topics", ())]


def prefill_summary(found: Json) -> str | None:
    """Return the status of the prefill in one word."""
    state = found.get("prefill")
    return None if state is None else str(state["status"])


def details_text(found: Json) -> str:
    """Return a subscription with its status as text."""
    title = f"Subscription {found['name']}"
    if found["state"] == "unreadable":
        rows: Rows = [
            ("State", "unreadable: this version neither delivers nor changes it"),
            ("Reason", found["unreadable"]),
            ("What to do", found["fix"]),
            ("Begins after", found["begin"]),
        ]
        return format_block(title, [*rows, *_suspended_rows(found["suspended"])])
    definition = _definition(found)
    wanted, hidden, replay = definition.filter, definition.hidden_fields, found["replay"]
    filters = [f"{name} = {' or '.join(values)}" for name, values in wanted.attributes.items()]
    filters += [f"{path} = {' or '.join(map(json.dumps, values))}" for path, values in wanted.fields.items()]
    rows = [
        ("Topics", topic_labels(found)),
        *([("Only", filters)] if filters else []),
        *([("Hidden", list(hidden) or "nothing")] if hidden != DEFAULT_HIDDEN_FIELDS else []),
        *_delivery_rows(definition, found.get("push")),
        ("State", describe_state(found)),
        *([] if found["pause_reason"] is None else [("Pause reason", found["pause_reason"])]),
        *_problem_rows(found["push_trouble"]),
        ("Created", read_time(found["created"])),
        ("Begins after", found["begin"]),
        *([] if found.get("in_force_after") is None else [("In force after", found["in_force_after"])]),
        ("Newest position", found["position"]),
        ("Dispatched up to", found["dispatched_up_to"]),
        *([("Lag", f"{found['lag']} positions")] if found["lag"] else []),
        ("Waiting", "no queue" if found["backlog_by_kind"] is None else _waiting_text(found)),
        ("Prefill", _prefill_text(found["prefill"])),
        *(
            []
            if replay is None
            else [("Replay", f"{replay['status']}, {_progress(replay)}, job {_ending(replay, 'job')}")]
        ),
    ]
    if definition.retention_seconds is not None:
        rows.append(("Kept for", timedelta(seconds=definition.retention_seconds)))
    rows += _delivery_state_rows(found)
    expired = found["expired"]
    if expired is not None:
        rows.append(("Expired", f"{expired['count']} unacknowledged messages, the last on {_time(expired['last'])}"))
    if found["unreadable"] is not None:
        rows.append(("Unreadable", found["unreadable"]))
    return format_block(title, [*rows, *_suspended_rows(found["suspended"])])


def _definition(found: Json) -> Subscription:
    """Return the options with their defaults; of secrets the JSON says only that they are there."""
    given = {name: found[name] for name in _OPTIONS if found.get(name) is not None}
    if found.get("push") is not None:
        given["push"] = {name: value for name, value in found["push"].items() if name not in _SECRETS}
    return Subscription.from_json(given)


def _delivery_state_rows(found: Json) -> Rows:
    """Return the rows about deliveries under way and failed ones; none if there are none."""
    rows: Rows = []
    if found["leases"]:
        holders = [
            f"{each['messages']} by {each['instance']} until {_time(each['until'])}"
            for each in found["leases"][:_MAX_LISTED_LEASES]
        ]
        more = len(found["leases"]) - _MAX_LISTED_LEASES
        rows.append(("Leased", [*holders, *([f"and by {more} more instances"] if more > 0 else [])]))
    if found["next_attempt"] is not None:
        next_attempt, what = _time(found["next_attempt"]), "message" if found["delayed"] == 1 else "messages"
        rows.append(("Delayed", f"{found['delayed']} {what}, the next attempt at {next_attempt}"))
    if found["dead_letters"]:
        rows.append(("Dead letters", found["dead_letters"]))
    last = found["last_error"]
    if last is not None:
        when = "" if last["at"] is None else f" ({_time(last['at'])})"
        message = "" if last["sequence"] is None else f" of message {last['sequence']}"
        rows.append(("Last error", f"{last['part']}{message}: {last['reason']}{when}"))
    return rows


def _problem_word(problem: Json) -> str:
    """Return `failing` if an endpoint accepts no messages, else `stuck`."""
    return "failing" if problem["endpoints"] else "stuck"


def _problem_rows(problem: Json | None) -> Rows:
    if problem is None:
        return []
    endpoints = [
        f"{each['endpoint']}, since {_time(each['since'])}: {_progress_at(each)}" for each in problem["endpoints"]
    ]
    return [("Push problem", problem["reason"]), *([("Failing", endpoints)] if endpoints else [])]


def _progress_at(endpoint: Json) -> str:
    return describe_progress(endpoint["attempts"], endpoint["breaker"], endpoint["window"])


def _suspended_rows(suspended: Json | None) -> Rows:
    if suspended is None:
        return []
    reason = f"at position {suspended['position']}: {suspended['reason']}"
    return [("Suspended", reason), ("Since", read_time(suspended["at"]))]


def _delivery_rows(definition: Subscription, shown_push: Json | None) -> Rows:
    """Return the rows of the delivery settings; for a pull subscription, those that differ from their defaults."""
    push, retry = definition.push, definition.retry
    until = "for ever" if retry.max_attempts is None else f"up to {retry.max_attempts} times"
    tried = ("Tried", f"{until}, after {retry.min_backoff_seconds:g} to {retry.max_backoff_seconds:g} s")
    order = ("Order", "none" if definition.order_by is None else definition.order_by.value)
    lease = definition.lease_seconds
    rows: Rows = []
    if push is None or shown_push is None:
        if definition.delivery is not Delivery.ORDERED:
            rows += [("Delivery", definition.delivery), order]
        return [
            *rows,
            *([("Lease", timedelta(seconds=lease))] if lease != DEFAULT_LEASE_SECONDS else []),
            *([tried] if retry != RetryPolicy() else []),
        ]
    signed = "no" if "secret" not in shown_push else "with two secrets" if "old_secret" in shown_push else "yes"
    rows += [
        ("Pushed to", list(push.endpoints)),
        ("Format", push.format.value),
        ("Acknowledged by", push.ack_codes.value),
        ("Within", timedelta(seconds=push.ack_deadline_seconds)),
        tried,
        order,
        ("Signed", signed),
    ]
    if "old_secret_until" in shown_push:
        rows.append(("Old secret until", read_time(shown_push["old_secret_until"])))
    if "bearer_token" in shown_push:
        rows.append(("Bearer token", "yes"))
    if push.after_dead_letter is not AfterDeadLetter.CONTINUE:
        rows.append(("After a dead letter", push.after_dead_letter.value))
    return rows


def _waiting_text(found: Json) -> str:
    waiting, age = found["backlog_by_kind"], found["oldest_age_seconds"]
    put_back = f", {waiting['retry']} put back" if waiting["retry"] else ""
    oldest = "" if age is None else f"; the oldest for {format_duration(timedelta(seconds=int(age)))}"
    return f"{waiting['main']} live, {waiting['prefill']} of prefill and replay{put_back}{oldest}"


def _prefill_text(state: Json | None) -> str:
    """Describe the progress of a prefill."""
    if state is None:
        return "none"
    return f"{state['status']}, {_progress(state)}, attempt {state['attempt']}, as of {_ending(state, 'position')}"


def _progress(state: Json) -> str:
    total = "" if state["total"] is None else f" of {state['total']}"
    return f"{state['written']}{total} written"


def _ending(state: Json, name: str) -> str:
    reason = f": {state['reason']}" if state["reason"] else ""
    return f"{state[name]}{reason}"


def _time(text: str) -> str:
    moment = read_time(text)
    return "" if moment is None else format_time(moment)
