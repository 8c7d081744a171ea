"""Subscriptions: who gets what, how far each is, and what waits for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from nicegui import ui

from purveyor.app.console import html
from purveyor.app.console.alerts import Level
from purveyor.app.console.console import Console
from purveyor.app.console.flow_graph import all_troubles
from purveyor.app.console.formatting import duration, number, rate
from purveyor.app.console.html import Head
from purveyor.app.console.page_base import button, card, page_frame
from purveyor.app.console.paged_table import Listing
from purveyor.app.console.pages.subscription_forms import add_subscription
from purveyor.app.console.snapshot import Facts, QueueFacts
from purveyor.app.telemetry.queue_metrics import state_of
from purveyor.model.registration import PrefillStatus
from purveyor.queues.registry import Registered, Unreadable

STATES = {
    "active": Level.FINE,
    "paused": Level.WARNING,
    "suspended": Level.STUCK,
    "prefill_failed": Level.STUCK,
    "unreadable": Level.STUCK,
    "prefilling": Level.NOTE,
    "registering": Level.NOTE,
    "deleting": Level.NOTE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One subscription."""

    found: Registered | Unreadable
    queue: QueueFacts | None
    level: Level
    age_seconds: float | None
    rate: float | None
    dead: int


def install(console: Console) -> None:
    """Make it known."""

    @ui.page("/console/subscriptions", title="Subscriptions · Purveyor")
    async def subscriptions() -> None:
        here = "/console/subscriptions"
        with (
            page_frame(console, here, "Subscriptions", "Who asked for which events, and what waits for them.") as page,
            card(),
        ):
            listing = Listing[Row]("subscriptions", _matches, _table)
            with listing.tools:
                button("Add a subscription", lambda: add_subscription(page), kind="main")
        page.on_facts(lambda facts: listing.show(rows(facts, console)))
        await page.begin()


def rows(facts: Facts, console: Console) -> list[Row]:
    """All subscriptions, those that need somebody first."""
    history, now = console.gatherer.history, facts.at.timestamp()
    levels: dict[str, Level] = {}
    for trouble in all_troubles(facts, history):
        if trouble.about.startswith("sub:"):
            name = trouble.about.removeprefix("sub:")
            levels[name] = max(levels.get(name, Level.FINE), trouble.level)
    found = []
    every: dict[str, Registered | Unreadable] = {**facts.subscriptions, **facts.unreadable}
    for name, each in every.items():
        queue = facts.queues.get(name)
        oldest = queue.oldest if queue is not None else None
        found.append(
            Row(
                found=each,
                queue=queue,
                level=levels.get(name, Level.FINE),
                age_seconds=None if oldest is None else max((facts.at - oldest).total_seconds(), 0.0),
                rate=history.of("done", name).rate(now),
                dead=facts.dead_letters.get(f"subscription-{name}", 0),
            )
        )
    return sorted(found, key=lambda row: (-row.level, row.found.name))


def state(found: Registered | Unreadable, level: Level = Level.FINE) -> html.Markup:
    """How it is, in a word."""
    word = _word(found)
    return html.badge(word.replace("_", " "), max(STATES.get(word, Level.NOTE), level))


def _word(found: Registered | Unreadable) -> str:
    return "unreadable" if isinstance(found, Unreadable) else state_of(found)


def prefill(found: Registered) -> html.Cell:
    """How far its prefill is."""
    told = found.prefill
    if told is None:
        return "not asked for"
    if told.status is PrefillStatus.RUNNING and told.total:
        bar = html.progress(told.written, told.total).text
        return html.Markup(f"{bar}{html.cell(number(told.written))} of {html.cell(number(told.total))}")
    if told.status is PrefillStatus.RUNNING:
        return f"{told.status.value}, {number(told.written)} objects so far"
    return (
        f"{told.status.value}, {number(told.written)} objects"
        if told.status is PrefillStatus.DONE
        else told.status.value
    )


def _matches(row: Row, text: str) -> bool:
    words = [row.found.name, _word(row.found)]
    if isinstance(row.found, Registered):
        definition = row.found.record.definition
        words += [definition.delivery.value, *(f"{each.realm}:{each.topic}" for each in definition.realms_topics)]
    return any(text in word.lower() for word in words)


def _asked_for(found: Registered | Unreadable) -> tuple[html.Cell, html.Cell, html.Cell]:
    """Its delivery, topics and prefill, if they are understood."""
    if isinstance(found, Unreadable):
        return None, None, None
    definition = found.record.definition
    topics = ", ".join(f"{each.realm}:{each.topic}" for each in definition.realms_topics)
    return definition.delivery.value, topics, prefill(found)


def _table(found: Sequence[Row]) -> str:
    if not found:
        return html.empty(
            "No subscription", "Add one here, with purveyor subscription add, or by POST /v1/subscriptions."
        )
    heads = (
        Head("Subscription"),
        Head("State"),
        Head("Backlog", numeric=True),
        Head("Oldest", numeric=True),
        Head("Rate", numeric=True, hint="Acknowledged in a second, of late"),
        Head("Delivery", narrow=False),
        Head("Topics", narrow=False),
        Head("Prefill"),
        Head("Dead", numeric=True, hint="Dead letters: messages it could not process"),
    )
    return html.table(
        heads,
        [
            (
                html.link(row.found.name, f"/console/subscriptions/{quote(row.found.name)}"),
                state(row.found, row.level),
                number(row.queue.messages if row.queue is not None else None),
                duration(row.age_seconds),
                rate(row.rate),
                *_asked_for(row.found),
                number(row.dead),
            )
            for row in found
        ],
        label="Subscriptions",
    )
