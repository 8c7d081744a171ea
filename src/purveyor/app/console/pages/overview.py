"""The overview page: alerts, key numbers, and the flow as a live picture."""

from nicegui import ui

from purveyor.app.console import flow_svg, html
from purveyor.app.console.console import Console
from purveyor.app.console.flow_graph import Flow, build_flow
from purveyor.app.console.formatting import format_count, format_duration, format_number, format_rate
from purveyor.app.console.html import TableColumn
from purveyor.app.console.page_base import LiveHtml, card, page_frame
from purveyor.app.console.snapshot import QueueKind, SystemSnapshot
from purveyor.app.console.time_series import History


def install(console: Console) -> None:
    """Register the page."""

    @ui.page("/", title="Overview · Purveyor")
    async def overview() -> None:
        with page_frame(console, "/", "Overview", "Every change, to every subscriber, in order, once.") as page:
            alerts = LiveHtml()
            numbers = LiveHtml()
            with card("The flow", "Each arrow shows its rate, the waiting messages, and the age of the oldest one."):
                drawn, ways = LiveHtml(), LiveHtml(classes="live ways")

        def show(snapshot: SystemSnapshot) -> None:
            flow = build_flow(snapshot, console.collector.history)
            alerts.show(html.alerts(flow.alerts))
            numbers.show(key_numbers(snapshot, console.collector.history))
            drawn.show(flow_svg.render(flow))
            ways.show(as_list(flow))

        page.on_snapshot(show)
        await page.begin()


def key_numbers(snapshot: SystemSnapshot, history: History) -> str:
    """Return the key numbers: events in, deliveries, backlog, dead letters."""
    now = snapshot.at.timestamp()
    queues = [queue for queue in snapshot.queues.values() if queue.kind is QueueKind.SUBSCRIPTION]
    into = history.of("last", "incoming").rate(now)
    out = sum(history.of("done", queue.name).rate(now) or 0.0 for queue in queues)
    waiting = sum(queue.messages for queue in queues)
    oldest = min((queue.oldest for queue in queues if queue.oldest is not None), default=None)
    incoming = snapshot.queues.get("incoming")
    return html.large_numbers(
        [
            (
                "Events in",
                format_rate(into or 0.0),
                f"{format_number(incoming.last_sequence if incoming else 0)} in total",
            ),
            ("Deliveries", format_rate(out), f"to {format_count(len(snapshot.subscriptions), 'subscription')}"),
            (
                "Backlog",
                format_number(waiting),
                f"the oldest for {format_duration((snapshot.at - oldest).total_seconds())}"
                if oldest
                else "nothing waits",
            ),
            (
                "Dead letters",
                format_number(snapshot.dead_letter_total),
                "to be handled" if snapshot.dead_letter_total else "none",
            ),
        ]
    )


def as_list(flow: Flow) -> str:
    """Return the arrows as a table, for narrow screens."""
    heads = (
        TableColumn("Arrow"),
        TableColumn("Rate", numeric=True),
        TableColumn("Backlog", numeric=True),
        TableColumn("Oldest", numeric=True),
    )
    rows = [
        (
            f"{flow.title(arrow.source)} → {flow.title(arrow.target)}",
            format_rate(arrow.rate),
            format_number(arrow.backlog),
            format_duration(arrow.age_seconds),
        )
        for arrow in flow.arrows
    ]
    return html.table(heads, rows, label="The flow")
