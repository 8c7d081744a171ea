"""The subscriptions page with state, backlog, topics and prefill of each, and the page of one subscription.

The page of one shows backlog, position, deliveries over time, leased messages, and actions.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from nicegui import ui

from purveyor.app.console import html
from purveyor.app.console.alert_groups import all_alerts, ranked
from purveyor.app.console.alerts import Alert, Kind, Level
from purveyor.app.console.console import Console
from purveyor.app.console.formatting import format_ago, format_duration, format_number, format_rate, format_time
from purveyor.app.console.html import TableColumn, copyable, copyable_code
from purveyor.app.console.page_base import ConsolePage, LiveHtml, PagedTable, button, card, page_frame
from purveyor.app.console.pages.attempts import AttemptLogCard
from purveyor.app.console.pages.dead_letters import attempts_table
from purveyor.app.console.pages.publish_dialog import publish_event
from purveyor.app.console.pages.queue_browser import (
    QueueHead,
    WaitingMessage,
    action_link,
    failed_attempts,
    label_cells,
    preview_line,
    read_queue_head,
    show_message,
)
from purveyor.app.console.pages.subscription_actions import Actions
from purveyor.app.console.pages.subscription_form import add_subscription
from purveyor.app.console.snapshot import QueueSnapshot, SystemSnapshot
from purveyor.app.console.time_series import COLOURS, plot, rate_line, value_line
from purveyor.app.telemetry.queue_metrics import state_of
from purveyor.delivery.subscription_status import SubscriptionStatus, read_status
from purveyor.model.delivery_policy import DEFAULT_HIDDEN_FIELDS, Delivery
from purveyor.model.delivery_state import SubjectKind
from purveyor.model.errors import PurveyorError
from purveyor.model.message_headers import REPLAY_JOB
from purveyor.model.registration import PrefillStatus
from purveyor.model.subscription import Subscription
from purveyor.queues.registry import Registered, Unreadable

STATES = {
    "active": Level.FINE,
    "paused": Level.NOTE,
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
    alert: Alert | None
    age_seconds: float | None
    rate: float | None
    dead: int


def install_subscriptions(console: Console) -> None:
    """Register the list of subscriptions."""

    @ui.page("/console/subscriptions", title="Subscriptions · Purveyor")
    async def subscriptions() -> None:
        here = "/console/subscriptions"
        with (
            page_frame(console, here, "Subscriptions", "Each subscription with its topics and its backlog.") as page,
            card(),
        ):
            listing = PagedTable[Row]("subscriptions", _matches, _table)
            with listing.tools:
                button("Publish an event …", lambda: publish_event(page))
                button("Add a subscription", lambda: add_subscription(page), kind="main")
        page.on_snapshot(lambda snapshot: listing.show(build_rows(snapshot, console)))
        await page.begin()


def build_rows(snapshot: SystemSnapshot, console: Console) -> list[Row]:
    """Return all subscriptions, those with the most severe alerts first."""
    history, now = console.collector.history, snapshot.at.timestamp()
    worst = {alert.about.removeprefix("sub:"): alert for alert in reversed(ranked(all_alerts(snapshot, history)))}
    found = []
    every: dict[str, Registered | Unreadable] = {**snapshot.subscriptions, **snapshot.unreadable}
    for name, each in every.items():
        queue = snapshot.queues.get(name)
        oldest = queue.oldest if queue is not None else None
        found.append(
            Row(
                found=each,
                queue=queue,
                alert=worst.get(name),
                age_seconds=None if oldest is None else max((snapshot.at - oldest).total_seconds(), 0.0),
                rate=history.of("done", name).rate(now),
                dead=snapshot.dead_letters.get(f"subscription-{name}", 0),
            )
        )
    return sorted(found, key=lambda row: (-(row.alert.level if row.alert else Level.FINE), row.found.name))


_ALERT_LABELS = {Kind.NOT_PUSHED: "not pushed", Kind.NO_CONSUMER: "no consumer", Kind.EXPIRING: "expiring"}


def state_badge(found: Registered | Unreadable, alert: Alert | None = None) -> html.Markup:
    """Return the state, or the problem of an active subscription, as a badge."""
    word = _state_name(found)
    level = STATES.get(word, Level.NOTE)
    if alert is None:
        return html.badge(word.replace("_", " "), level)
    return html.badge(_ALERT_LABELS.get(alert.kind, word.replace("_", " ")), max(level, alert.level))


def _state_name(found: Registered | Unreadable) -> str:
    return "unreadable" if isinstance(found, Unreadable) else state_of(found)


def prefill_cell(found: Registered) -> html.Cell:
    """Return the progress of the prefill, or of the replay that uses its place."""
    prefill, replay = found.own_prefill, found.replay
    if replay is not None:
        done = replay.status is PrefillStatus.DONE
        written = f"{format_number(replay.written)} events"
        return (replay.reason or f"replay done, {written}") if done else f"replay running, {written} so far"
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
    topics = html.names([f"{each.realm}:{each.topic}" for each in definition.realms_topics])
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
                state_badge(row.found, row.alert),
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


_CHART_SECONDS = 10.0


def install_subscription(console: Console) -> None:
    """Register the page of one subscription."""

    @ui.page("/console/subscriptions/{name}", title="Subscription · Purveyor")
    async def subscription(name: str) -> None:
        here = "/console/subscriptions"
        with page_frame(console, here, name, "A subscription, its queue, and the delivery of its messages.") as page:
            shown = _SubscriptionView(page, name)
        page.on_snapshot(shown.show)
        await page.begin()


class _SubscriptionView:
    """The content of the page of one subscription."""

    def __init__(self, page: ConsolePage, name: str) -> None:
        self._page, self._name = page, name
        self._plotted_at = 0.0
        self._head = QueueHead()
        self._registered: Registered | None = None
        self._alerts = LiveHtml()
        self._actions = Actions(page, name)
        self._numbers = LiveHtml()
        with ui.element("div").classes("split"):
            with card("Deliveries", "Messages per second in the last half hour."):
                self._deliveries = ui.echart(plot([], now=time.time())).classes("chart")
            with card("Failures", "Failed deliveries per second, and the backlog."):
                self._errors = ui.echart(plot([], now=time.time())).classes("chart")
        with card("Next messages", "The oldest waiting messages: the attempts of each, and the instance that has it."):
            self._waiting_table = LiveHtml()
        self._attempts = AttemptLogCard(page)
        with card("Definition"):
            self._definition = LiveHtml()
        with card("Use it", "PASSWORD is the password of the subscription."):
            self._use = LiveHtml()
        self._base = str(ui.context.client.request.base_url)
        page.on_action("attempt", self._open)

    async def show(self, snapshot: SystemSnapshot) -> None:
        """Show a snapshot."""
        found = snapshot.subscriptions.get(self._name)
        history, now = self._page.console.collector.history, snapshot.at.timestamp()
        about = f"sub:{self._name}"
        alerts = [each for each in all_alerts(snapshot, history) if each.about in (about, "server")]
        self._alerts.show(html.alerts(alerts, expanded=True) if alerts else "")
        self._registered = found
        unread = snapshot.unreadable.get(self._name)
        self._actions.update(found or unread)
        if unread is not None:
            self._numbers.show(html.empty(f"{self._name} has an unreadable record", unread.reason))
            return
        if found is None:
            self._numbers.show(html.empty(f"There is no subscription {self._name}", "It was deleted, or never added."))
            return
        if snapshot.problem is not None:
            return
        try:
            services = self._page.console.services
            status = await read_status(services.queues, await services.subscriptions.registry(), found)
            self._head = await read_queue_head(services.queues, found)
        except PurveyorError:
            return  # an alert shows the reason
        unreadable = html.empty("The delivery state is unreadable", status.unreadable) if status.unreadable else ""
        self._numbers.show(unreadable + self._key_numbers(snapshot, status))
        self._waiting_table.show(_waiting_table(self._head))
        worst = next((each for each in ranked(alerts) if each.about == about), None)
        self._definition.show(_definition(found, worst))
        self._use.show(use_lines(found.record.definition, self._base))
        await self._attempts.update(found)
        if now - self._plotted_at >= _CHART_SECONDS:
            self._plotted_at = now
            self._plot(now, is_pushed=found.record.definition.push is not None)

    def _key_numbers(self, snapshot: SystemSnapshot, status: SubscriptionStatus) -> str:
        history, now, queue = (
            self._page.console.collector.history,
            snapshot.at.timestamp(),
            snapshot.queues.get(self._name),
        )
        oldest = queue.oldest if queue is not None else None
        filling = "prefill" if status.registered.replay is None else "replay"
        waits = (
            "nothing waits"
            if oldest is None
            else f"the oldest for {format_duration((snapshot.at - oldest).total_seconds())}"
        )
        return html.large_numbers(
            [
                (
                    "Backlog",
                    format_number(status.main),
                    f"{format_number(status.prefill)} of the {filling}; {waits}" if status.prefill else waits,
                ),
                (
                    "Position",
                    format_number(status.position),
                    f"acknowledged up to {format_number(self._head.acknowledged or None)}",
                ),
                ("Deliveries", format_rate(history.of("done", self._name).rate(now)), "acknowledged per second"),
                (
                    "Leased",
                    format_number(self._head.leased),
                    f"{format_number(self._head.failed)} with failed attempts",
                ),
            ]
        )

    def _plot(self, now: float, *, is_pushed: bool) -> None:
        history, name = self._page.console.collector.history, self._name
        arrived = rate_line("arrived", history.of("last", name), now, COLOURS[0])
        done = rate_line("acknowledged", history.of("done", name), now, COLOURS[1])
        self._draw(self._deliveries, plot([arrived, done], now=now, unit="/s"))
        if is_pushed:  # the push workers count redeliveries; they report the attempts of an endpoint that fails
            failures = [rate_line("failed attempts", history.of("failed", name), now, COLOURS[2])]
        else:
            again = rate_line("redelivered", history.of("redelivered", name), now, COLOURS[2])
            failures = [again, rate_line("returned", history.of("returned", name), now, COLOURS[4])]
        dead = rate_line("dead letters", history.of("dead", f"subscription-{name}"), now, COLOURS[3])
        waiting = value_line("backlog", history.of("waiting", name), now, "#8590a0")
        options = plot([*failures, dead, waiting], now=now)
        options["yAxis"] = [options["yAxis"], {**options["yAxis"], "splitLine": {"show": False}, "position": "right"}]
        options["series"][-1] |= {"yAxisIndex": 1, "lineStyle": {"width": 1, "color": "#8590a0"}}
        self._draw(self._errors, options)

    @staticmethod
    def _draw(chart: ui.echart, options: dict[str, object]) -> None:
        chart.options.clear()
        chart.options.update(options)
        chart.update()

    async def _open(self, key: str) -> None:
        found = next((each for each in self._head.messages if str(each.message.sequence) == key), None)
        if found is None or self._registered is None:
            return
        queues = self._page.console.services.queues
        noted = await failed_attempts(queues, self._registered, found.message.sequence)
        more = f"<h3>Attempts that failed</h3>{attempts_table(noted)}" if noted else ""
        await show_message(found.message, more)


_KINDS = "live: a new event; prefill: the initial state; replay: a past event; retry: a dead letter put back"


def _waiting_table(head: QueueHead) -> str:
    if not head.messages:
        return html.empty("Nothing waits", "Every message that was written to its queue is acknowledged.")
    heads = (
        TableColumn("Sequence", numeric=True),
        TableColumn("Position", numeric=True, narrow=False),
        TableColumn("Kind", narrow=False, hint=_KINDS),
        TableColumn("Stored", shape="tight"),
        TableColumn("Topic", shape="name"),
        TableColumn("Key", shape="name"),
        TableColumn("Attempts", numeric=True, hint="How often it was delivered to a consumer or sent to an endpoint"),
        TableColumn("Now", shape="tight"),
        TableColumn("Content", narrow=False, shape="line"),
    )
    rows = [
        (
            action_link(str(each.message.sequence), "attempt", str(each.message.sequence)),
            ", ".join(each.message.headers.get("Purveyor-Position", ())) or None,
            _kind(each),
            format_ago(each.message.timestamp),
            *label_cells(each.message.data),
            format_number(each.deliveries),
            _now(each),
            html.Markup(f'<span class="mono soft">{html.cell(preview_line(each.message.data))}</span>'),
        )
        for each in head.messages
    ]
    return html.table(heads, rows, label="Next messages")


def _kind(each: WaitingMessage) -> str:
    if each.kind is SubjectKind.PREFILL and REPLAY_JOB in each.message.headers:
        return "replay"
    return "live" if each.kind is SubjectKind.MAIN else each.kind.value


def _now(each: WaitingMessage) -> html.Cell:
    if each.instance is not None:
        return html.cut(f"leased by {each.instance}, lease ends {format_ago(each.until)}", most=36)
    return f"next attempt {format_ago(each.until)}" if each.until is not None else "waits"


def _definition(found: Registered, alert: Alert | None) -> str:
    record, definition = found.record, found.record.definition
    public, retry = definition.to_public_json(), definition.retry
    times = "without limit" if retry.max_attempts is None else f"{retry.max_attempts} times"
    rows: list[tuple[str, html.Cell]] = [
        ("State", state_badge(found, alert)),
        ("Topics", html.names([f"{each.realm}:{each.topic}" for each in definition.realms_topics], shown=20)),
        ("Delivery", definition.delivery.value),
        ("Order", "none" if definition.order_by is None else f"by {definition.order_by.value}"),
        ("Lease", f"{definition.lease_seconds:g} s"),
        ("Retry", f"{times}, after {retry.min_backoff_seconds:g} to {retry.max_backoff_seconds:g} s"),
        ("Prefill", prefill_cell(found)),
        ("Begins after", format_number(record.begin)),
        ("Added", format_time(record.created)),
        ("Filter", "all events of its topics" if not definition.filter else str(public.get("filter"))),
        ("Hidden fields", _hidden(definition.hidden_fields)),
        ("Queue", html.link(definition.name, f"/console/queues?queue={quote(definition.name)}")),
    ]
    if definition.push is not None:
        rows.insert(3, ("Endpoint", ", ".join(definition.push.endpoints)))
        rows.insert(4, ("Format", definition.push.format.value))
        rows.insert(5, ("Signed", "yes" if definition.push.secret is not None else "no"))
    return html.pairs(rows)


def _hidden(fields: tuple[str, ...]) -> str:
    if fields == DEFAULT_HIDDEN_FIELDS:
        return "passwords, their hashes and keys (default)"
    return ", ".join(fields) or "none"


def use_lines(definition: Subscription, base: str) -> str:
    """Return the name, the URL and a curl line. `base` is the address of the API, as the browser sees it."""
    name, url = definition.name, f"{base.rstrip('/')}/v1/subscriptions/{quote(definition.name)}"
    if definition.delivery is Delivery.PUSH:
        curl, what = f"curl -u {name}:PASSWORD '{url}/attempts?outcome=failed'", "Its failed attempts"
    else:
        curl, what = f"curl -u {name}:PASSWORD '{url}/messages/next?timeout=5'", "Its next message"
    rows = [
        ("Name", copyable(name, name, "the name")),
        ("URL", copyable_code(url, "the URL")),
        (what, copyable_code(curl, "the curl line")),
    ]
    return f'<div class="lines">{html.pairs(rows)}</div>'
