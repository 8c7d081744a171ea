"""Why `purveyor next` got no message, from the status of the subscription. Pure.

A new user sees an empty answer first: the pipeline does not run, the subscription is paused, or another consumer has
leased the messages. The first cause in this order is named, because the later ones cannot end before it does.
"""

from dataclasses import dataclass

from purveyor.app.cli.render import format_time, read_time
from purveyor.model.json_fields import Json

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class NoMessage:
    """The reason, if one is known, and what to do."""

    reason: str | None
    fix: str


def explain_no_message(name: str, status: Json) -> NoMessage:
    """Return why a subscription with this status (`GET .../status`) had no message to lease."""
    show = f"`purveyor subscription show {name}`"
    wait = f"see {show}, or wait longer with --wait"
    suspended, prefill, leases = status.get("suspended"), status.get("prefill"), status.get("leases")
    if status.get("paused"):
        cause = f" ({status['pause_reason']})" if status.get("pause_reason") else ""
        return NoMessage(f"it is paused{cause}", f"`purveyor subscription resume {name}` continues the delivery")
    if prefill and prefill["status"] in ("pending", "running"):
        return NoMessage(f"its prefill is {prefill['status']}, and comes before its events", wait)
    if leases:
        return NoMessage(_describe_leases(leases), f"wait until then, or see {show}")
    if status.get("next_attempt"):
        return NoMessage(f"its next message is delivered again at {_time(status['next_attempt'])}", wait)
    if suspended:
        return NoMessage(
            f"dispatch is suspended at position {suspended['position']}: {suspended['reason']}",
            f"remove the cause, then `purveyor subscription resume {name}`",
        )
    if status.get("lag"):
        return NoMessage(
            "the pipeline has not dispatched all events yet", f"see that the pipeline runs (`purveyor up`), or {show}"
        )
    return NoMessage(None, wait)


def _describe_leases(leases: list[Json]) -> str:
    count = sum(each["messages"] for each in leases)
    more = "" if len(leases) <= _MOST_NAMED else f" and {len(leases) - _MOST_NAMED} others"
    names = ", ".join(repr(each["instance"]) for each in leases[:_MOST_NAMED])
    what = "1 message is" if count == 1 else f"{count} messages are"
    return f"{what} leased by {names}{more} until {_time(max(each['until'] for each in leases))}"


def _time(text: str) -> str:
    moment = read_time(text)
    return text if moment is None else format_time(moment)
