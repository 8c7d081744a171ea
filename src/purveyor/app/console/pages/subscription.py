"""One subscription: its backlog, position and deliveries over time, what is in whose hands, and what can be done."""

import time
from urllib.parse import quote

from nicegui import ui

from purveyor.app.console import html, queue_head
from purveyor.app.console.charts import COLOURS, as_is, as_rate, plot
from purveyor.app.console.console import Console
from purveyor.app.console.flow_graph import all_troubles
from purveyor.app.console.formatting import ago, duration, moment, number, rate
from purveyor.app.console.html import Head
from purveyor.app.console.message_preview import preview
from purveyor.app.console.page_base import Live, Page, card, page_frame
from purveyor.app.console.pages.dead_letters import attempts_table
from purveyor.app.console.pages.queue_browser import act_link, show_message
from purveyor.app.console.pages.subscription_actions import Actions
from purveyor.app.console.pages.subscriptions import prefill, state
from purveyor.app.console.queue_head import Head as QueueHead
from purveyor.app.console.snapshot import Facts
from purveyor.delivery import subscription_status
from purveyor.delivery.state import Kind
from purveyor.delivery.subscription_status import Overview
from purveyor.model.delivery_policy import DEFAULT_HIDDEN
from purveyor.model.errors import PurveyorError
from purveyor.queues.registry import Registered

_CHART_SECONDS = 10.0


def install(console: Console) -> None:
    """Make it known."""

    @ui.page("/console/subscriptions/{name}", title="Subscription · Purveyor")
    async def subscription(name: str) -> None:
        here = "/console/subscriptions"
        with page_frame(console, here, name, "A subscription, its queue, and what becomes of its messages.") as page:
            shown = _Shown(page, name)
        page.on_facts(shown.show)
        await page.begin()


class _Shown:
    """The parts of the page."""

    def __init__(self, page: Page, name: str) -> None:
        self._page, self._name = page, name
        self._plotted_at = 0.0
        self._head = QueueHead()
        self._registered: Registered | None = None
        self._troubles = Live()
        self._actions = Actions(page, name)
        self._numbers = Live()
        with ui.element("div").classes("split"):
            with card("Deliveries", "In the last half hour, in a second."):
                self._deliveries = ui.echart(plot([], now=time.time())).classes("chart")
            with card("Trouble", "Given out again, given back, and given up, in a second; and what waits."):
                self._errors = ui.echart(plot([], now=time.time())).classes("chart")
        with card("First in line", "The oldest messages that wait: how often each was tried, and who has it now."):
            self._line = Live()
        with card("What it asked for"):
            self._definition = Live()
        page.on_act("attempt", self._open)

    async def show(self, facts: Facts) -> None:
        """What is known now."""
        found = facts.subscriptions.get(self._name)
        history, now = self._page.console.gatherer.history, facts.at.timestamp()
        about = f"sub:{self._name}"
        troubles = [each for each in all_troubles(facts, history) if each.about in (about, "server")]
        self._troubles.show(html.troubles(troubles) if troubles else "")
        self._registered = found
        unread = facts.unreadable.get(self._name)
        self._actions.know(found or unread)
        if unread is not None:
            self._numbers.show(html.empty(f"{self._name} is not understood", unread.reason))
            return
        if found is None:
            self._numbers.show(html.empty(f"There is no subscription {self._name}", "It was deleted, or never added."))
            return
        if facts.problem is not None:
            return
        try:
            services = self._page.console.services
            told = await subscription_status.look(services.queues, await services.subscriptions.registry(), found)
            self._head = await queue_head.read(services.queues, found)
        except PurveyorError:
            return  # the trouble above says why
        not_known = html.empty("What was delivered is not understood", told.unreadable) if told.unreadable else ""
        self._numbers.show(not_known + self._figures(facts, told))
        self._line.show(_line(self._head))
        self._definition.show(_definition(found))
        if now - self._plotted_at >= _CHART_SECONDS:
            self._plotted_at = now
            self._plot(now)

    def _figures(self, facts: Facts, told: Overview) -> str:
        history, now, queue = self._page.console.gatherer.history, facts.at.timestamp(), facts.queues.get(self._name)
        oldest = queue.oldest if queue is not None else None
        waits = "nothing waits" if oldest is None else f"the oldest for {duration((facts.at - oldest).total_seconds())}"
        return html.figures(
            [
                ("Backlog", number(told.main), f"{number(told.prefill)} of the prefill; {waits}"),
                ("Position", number(told.position), f"acknowledged up to {number(self._head.acknowledged or None)}"),
                ("Deliveries", rate(history.of("done", self._name).rate(now)), "acknowledged in a second"),
                ("In hand", number(self._head.leased), f"{number(self._head.failed)} tried in vain so far"),
            ]
        )

    def _plot(self, now: float) -> None:
        history, name = self._page.console.gatherer.history, self._name
        arrived = as_rate("arrived", history.of("last", name), now, COLOURS[0])
        done = as_rate("acknowledged", history.of("done", name), now, COLOURS[1])
        self._draw(self._deliveries, plot([arrived, done], now=now, unit="/s"))
        again = as_rate("given out again", history.of("redelivered", name), now, COLOURS[2])
        back = as_rate("given back", history.of("returned", name), now, COLOURS[4])
        dead = as_rate("dead letters", history.of("dead", f"subscription-{name}"), now, COLOURS[3])
        waiting = as_is("backlog", history.of("waiting", name), now, "#8590a0")
        options = plot([again, back, dead, waiting], now=now)
        options["yAxis"] = [options["yAxis"], {**options["yAxis"], "splitLine": {"show": False}, "position": "right"}]
        options["series"][3] |= {"yAxisIndex": 1, "lineStyle": {"width": 1, "color": "#8590a0"}}
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
        noted = await queue_head.failed(queues, self._registered, found.message.sequence)
        more = f"<h3>Attempts that failed</h3>{attempts_table(noted)}" if noted else ""
        await show_message(found.message, more)


def _line(head: QueueHead) -> str:
    if not head.messages:
        return html.empty("Nothing waits", "Every message that was written to its queue is acknowledged.")
    heads = (
        Head("Sequence", numeric=True),
        Head("Position", numeric=True),
        Head("Kind", hint="live: an event as it came; prefill: the state before; retry: a dead letter put back"),
        Head("Waits since", shape="tight"),
        Head("Attempts", numeric=True, hint="How often it was given to a consumer or sent to an endpoint"),
        Head("Now", shape="tight"),
        Head("Content", narrow=False, shape="line"),
    )
    rows = [
        (
            act_link(str(each.message.sequence), "attempt", str(each.message.sequence)),
            ", ".join(each.message.headers.get("Purveyor-Position", ())) or None,
            "live" if each.kind is Kind.MAIN else each.kind.value,
            ago(each.message.timestamp),
            number(each.deliveries),
            _now(each),
            html.Markup(f'<span class="mono soft">{html.cell(preview(each.message.data))}</span>'),
        )
        for each in head.messages
    ]
    return html.table(heads, rows, label="First in line")


def _now(each: queue_head.Attempted) -> str:
    if each.instance is not None:
        return f"in the hands of {each.instance}, lease ends {ago(each.until)}"
    return f"tried again {ago(each.until)}" if each.until is not None else "waits"


def _definition(found: Registered) -> str:
    record, definition = found.record, found.record.definition
    told, retry = definition.shown(), definition.retry
    times = "for ever" if retry.max_attempts is None else f"{retry.max_attempts} times"
    rows: list[tuple[str, html.Cell]] = [
        ("State", state(found)),
        ("Topics", ", ".join(f"{each.realm}:{each.topic}" for each in definition.realms_topics)),
        ("Delivery", definition.delivery.value),
        ("Order", "none" if definition.order_by is None else f"by {definition.order_by.value}"),
        ("Lease", f"{definition.lease_seconds:g} s"),
        ("Retry", f"{times}, after {retry.min_backoff_seconds:g} to {retry.max_backoff_seconds:g} s"),
        ("Prefill", prefill(found)),
        ("Begins behind position", number(record.begin)),
        ("Added", moment(record.created)),
        ("Filter", "everything of its topics" if not definition.filter else str(told.get("filter"))),
        ("Hidden fields", _hidden(definition.hidden_fields)),
        ("Queue", html.link(definition.name, f"/console/queues?queue={quote(definition.name)}")),
    ]
    if definition.push is not None:
        rows.insert(3, ("Endpoint", ", ".join(definition.push.endpoints)))
        rows.insert(4, ("Format", definition.push.format.value))
        rows.insert(5, ("Signed", "yes" if definition.push.secret is not None else "no"))
    return html.pairs(rows)


def _hidden(fields: tuple[str, ...]) -> str:
    if fields == DEFAULT_HIDDEN:
        return "passwords, their hashes and keys, as by default"
    return ", ".join(fields) or "none"
