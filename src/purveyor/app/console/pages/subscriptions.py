"""The subscriptions page: state, backlog, topics and prefill of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from nicegui import ui

from purveyor.app.console import html
from purveyor.app.console.alerts import Level
from purveyor.app.console.console import Console
from purveyor.app.console.flow_graph import all_alerts
from purveyor.app.console.formatting import format_duration, format_number, format_rate
from purveyor.app.console.html import TableColumn
from purveyor.app.console.page_base import PagedTable, button, card, page_frame
from purveyor.app.console.pages.subscription_actions import add_subscription
from purveyor.app.console.snapshot import QueueSnapshot, SystemSnapshot
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
    """A subscription in the table."""

    found: Registered | Unreadable
    queue: QueueSnapshot | None
    level: Level
    age_seconds: float | None
    rate: float | None
    dead: int


def install(console: Console) -> None:
    """Register the page."""

    @ui.page("/console/subscriptions", title="Subscriptions · Purveyor")
    async def subscriptions() -> None:
        here = "/console/subscriptions"
        with (
            page_frame(console, here, "Subscriptions", "Each subscription with its topics and its backlog.") as page,
            card(),
        ):
            listing = PagedTable[Row]("subscriptions", _matches, _table)
            with listing.tools:
                button("Add a subscription", lambda: add_subscription(page), kind="main")
        page.on_snapshot(lambda snapshot: listing.show(build_rows(snapshot, console)))
        await page.begin()


def build_rows(snapshot: SystemSnapshot, console: Console) -> list[Row]:
    """Return all subscriptions, those with the most severe alerts first."""
    history, now = console.collector.history, snapshot.at.timestamp()
    levels: dict[str, Level] = {}
    for alert in all_alerts(snapshot, history):
        if alert.about.startswith("sub:"):
            name = alert.about.removeprefix("sub:")
            levels[name] = max(levels.get(name, Level.FINE), alert.level)
    found = []
    every: dict[str, Registered | Unreadable] = {**snapshot.subscriptions, **snapshot.unreadable}
    for name, each in every.items():
        queue = snapshot.queues.get(name)
        oldest = queue.oldest if queue is not None else None
        found.append(
            Row(
                found=each,
                queue=queue,
                level=levels.get(name, Level.FINE),
                age_seconds=None if oldest is None else max((snapshot.at - oldest).total_seconds(), 0.0),
                rate=history.of("done", name).rate(now),
                dead=snapshot.dead_letters.get(f"subscription-{name}", 0),
            )
        )
    return sorted(found, key=lambda row: (-row.level, row.found.name))


def state_badge(found: Registered | Unreadable, level: Level = Level.FINE) -> html.Markup:
    """Return the state as a badge."""
    word = _state_name(found)
    return html.badge(word.replace("_", " "), max(STATES.get(word, Level.NOTE), level))


def _state_name(found: Registered | Unreadable) -> str:
    return "unreadable" if isinstance(found, Unreadable) else state_of(found)


def prefill_cell(found: Registered) -> html.Cell:
    """Return the progress of the prefill."""
    prefill = found.prefill
    if prefill is None:
        return "not requested"
    if prefill.status is PrefillStatus.RUNNING and prefill.total:
        bar = html.progress(prefill.written, prefill.total).text
        return html.Markup(
            f"{bar}{html.cell(format_number(prefill.written))} of {html.cell(format_number(prefill.total))}"
        )
    if prefill.status is PrefillStatus.RUNNING:
        return f"{prefill.status.value}, {format_number(prefill.written)} objects so far"
    return (
        f"{prefill.status.value}, {format_number(prefill.written)} objects"
        if prefill.status is PrefillStatus.DONE
        else prefill.status.value
    )


def _matches(row: Row, text: str) -> bool:
    words = [row.found.name, _state_name(row.found)]
    if isinstance(row.found, Registered):
        definition = row.found.record.definition
        words += [definition.delivery.value, *(f"{each.realm}:{each.topic}" for each in definition.realms_topics)]
    return any(text in word.lower() for word in words)


def _definition_cells(found: Registered | Unreadable) -> tuple[html.Cell, html.Cell, html.Cell]:
    """Return delivery, topics and prefill, or nothing if the record is unreadable."""
    if isinstance(found, Unreadable):
        return None, None, None
    definition = found.record.definition
    topics = ", ".join(f"{each.realm}:{each.topic}" for each in definition.realms_topics)
    return definition.delivery.value, topics, prefill_cell(found)


def _table(found: Sequence[Row]) -> str:
    if not found:
        return html.empty(
            "No subscriptions", "Add one here, with purveyor subscription add, or by POST /v1/subscriptions."
        )
    heads = (
        TableColumn("Subscription"),
        TableColumn("State"),
        TableColumn("Backlog", numeric=True),
        TableColumn("Oldest", numeric=True),
        TableColumn("Rate", numeric=True, hint="Acknowledged messages per second"),
        TableColumn("Delivery", narrow=False),
        TableColumn("Topics", narrow=False),
        TableColumn("Prefill"),
        TableColumn("Dead", numeric=True, hint="Dead letters: messages it could not process"),
    )
    return html.table(
        heads,
        [
            (
                html.link(row.found.name, f"/console/subscriptions/{quote(row.found.name)}"),
                state_badge(row.found, row.level),
                format_number(row.queue.messages if row.queue is not None else None),
                format_duration(row.age_seconds),
                format_rate(row.rate),
                *_definition_cells(row.found),
                format_number(row.dead),
            )
            for row in found
        ],
        label="Subscriptions",
    )
