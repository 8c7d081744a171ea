"""Overview: the flow as a live picture, and above it what is stuck, why, and what to do next."""

from nicegui import ui

from purveyor.app.console import flow_svg, html
from purveyor.app.console.console import Console
from purveyor.app.console.flow_graph import Flow, draw
from purveyor.app.console.formatting import duration, number, plural, rate
from purveyor.app.console.html import Head
from purveyor.app.console.page_base import Live, card, page_frame
from purveyor.app.console.snapshot import Facts, QueueKind
from purveyor.app.console.time_series import History


def install(console: Console) -> None:
    """Make it known."""

    @ui.page("/", title="Overview · Purveyor")
    async def overview() -> None:
        with page_frame(console, "/", "Overview", "Every change, to every subscriber, in order, once.") as page:
            troubles = Live()
            numbers = Live()
            with card("The flow", "Rate, messages that wait, and the age of the oldest of them on each arrow."):
                drawn, ways = Live(), Live(classes="live ways")

        def show(facts: Facts) -> None:
            flow = draw(facts, console.gatherer.history)
            troubles.show(html.troubles(flow.troubles))
            numbers.show(figures(facts, console.gatherer.history))
            drawn.show(flow_svg.render(flow))
            ways.show(as_list(flow))

        page.on_facts(show)
        await page.begin()


def figures(facts: Facts, history: History) -> str:
    """The numbers that tell whether work is done."""
    now = facts.at.timestamp()
    queues = [queue for queue in facts.queues.values() if queue.kind is QueueKind.SUBSCRIPTION]
    into = history.of("last", "incoming").rate(now)
    out = sum(history.of("done", queue.name).rate(now) or 0.0 for queue in queues)
    waiting = sum(queue.messages for queue in queues)
    oldest = min((queue.oldest for queue in queues if queue.oldest is not None), default=None)
    incoming = facts.queues.get("incoming")
    return html.figures(
        [
            (
                "Events in",
                rate(into or 0.0),
                f"{number(incoming.last_sequence if incoming else 0)} since the beginning",
            ),
            ("Deliveries", rate(out), f"to {plural(len(facts.subscriptions), 'subscription')}"),
            (
                "Backlog",
                number(waiting),
                f"the oldest for {duration((facts.at - oldest).total_seconds())}" if oldest else "nothing waits",
            ),
            ("Dead letters", number(facts.dead), "to be looked at" if facts.dead else "none"),
        ]
    )


def as_list(flow: Flow) -> str:
    """The arrows one below the other, for narrow screens."""
    heads = (Head("Way"), Head("Rate", numeric=True), Head("Backlog", numeric=True), Head("Oldest", numeric=True))
    rows = [
        (
            f"{flow.title(arrow.source)} → {flow.title(arrow.target)}",
            rate(arrow.rate),
            number(arrow.backlog),
            duration(arrow.age_seconds),
        )
        for arrow in flow.arrows
    ]
    return html.table(heads, rows, label="The flow")
