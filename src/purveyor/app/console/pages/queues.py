"""Queues: how full each is and who reads it, its messages, and what it would take to bring it to its declaration."""

from collections.abc import Sequence
from urllib.parse import quote

from nicegui import ui

from purveyor.app.console import html, message_preview
from purveyor.app.console.alerts import Level
from purveyor.app.console.console import Console
from purveyor.app.console.formatting import duration, number, rate, size
from purveyor.app.console.html import Head
from purveyor.app.console.page_base import Live, card, page_frame
from purveyor.app.console.paged_table import Listing
from purveyor.app.console.pages.queue_browser import Browser
from purveyor.app.console.pages.queue_migration import Migration
from purveyor.app.console.snapshot import Facts, QueueFacts, QueueKind

_ORDER = {QueueKind.INTERNAL: 0, QueueKind.STAGE: 1, QueueKind.SUBSCRIPTION: 2}


def install(console: Console) -> None:
    """Make it known."""

    @ui.page("/console/queues", title="Queues · Purveyor")
    async def queues(queue: str = "") -> None:
        here = "/console/queues"
        with page_frame(console, here, "Queues", "Everything between two parts waits in one of these.") as page:
            with card(f"Queue {queue}" if queue else "All queues"):
                if queue:
                    one = Live()
                else:
                    listing = Listing[QueueFacts]("queues", _matches, lambda rows: _table(rows, page_facts, console))
            if queue:
                with card("Messages", "Looked at, not taken: nobody's place in the queue changes."):
                    browser = Browser(page, queue)
            with card("Declaration", "What it would take to bring queues to what this version declares."):
                Migration(page, queue or None)
        page_facts: list[Facts] = []

        def show(facts: Facts) -> None:
            page_facts[:] = [facts]
            if queue:
                one.show(_detail(facts, queue, console))
                browser.know(facts.queues.get(queue))
            else:
                found = sorted(facts.queues.values(), key=lambda each: (_ORDER[each.kind], each.name))
                listing.show(found)

        page.on_facts(show)
        await page.begin()
        if queue:
            ui.timer(0, lambda: browser.read(message_preview.Look(queue)), once=True)


def _matches(row: QueueFacts, text: str) -> bool:
    return text in row.name.lower() or text in row.kind.value


def _table(rows: Sequence[QueueFacts], known: Sequence[Facts], console: Console) -> str:
    if not known:
        return ""
    facts, history = known[0], console.gatherer.history
    if not rows:
        return html.empty("No queue", "Queues are made by the first part that starts.")
    now = facts.at.timestamp()
    heads = (
        Head("Queue"),
        Head("Kind"),
        Head("State"),
        Head("Messages", numeric=True),
        Head("Oldest", numeric=True),
        Head("In", numeric=True, hint="Messages stored in a second, of late"),
        Head("Out", numeric=True, hint="Messages that left in a second, of late"),
        Head("Size", numeric=True),
        Head("Readers", numeric=True, hint="Durable readers; queues of subscriptions are read by the API"),
    )
    return html.table(
        heads,
        [
            (
                html.link(row.name, f"/console/queues?queue={quote(row.name)}"),
                row.kind.value,
                _state(row),
                number(row.messages),
                _age(row, facts),
                rate(history.of("last", row.name).rate(now)),
                rate(history.of("done", row.name).rate(now)),
                size(row.bytes),
                str(row.consumers) if row.kind is not QueueKind.SUBSCRIPTION else None,
            )
            for row in rows
        ],
        label="Queues",
    )


def _state(row: QueueFacts) -> html.Markup:
    return html.badge("sealed", Level.WARNING) if row.sealed else html.badge("open")


def _age(row: QueueFacts, facts: Facts) -> str:
    return duration(None if row.oldest is None else max((facts.at - row.oldest).total_seconds(), 0.0))


def _detail(facts: Facts, name: str, console: Console) -> str:
    row = facts.queues.get(name)
    if row is None:
        return html.empty(f"There is no queue {name}", "It was removed, or nobody has made it yet.")
    history, now = console.gatherer.history, facts.at.timestamp()
    told = html.pairs(
        [
            ("Kind", row.kind.value),
            ("State", _state(row)),
            ("Messages", number(row.messages)),
            ("Size", size(row.bytes)),
            ("Oldest", _age(row, facts)),
            ("Last sequence", number(row.last_sequence)),
            ("In", rate(history.of("last", name).rate(now))),
            ("Out", rate(history.of("done", name).rate(now))),
        ]
    )
    readers = facts.readers.get(name, ())
    if not readers:
        return told
    heads = (
        Head("Durable"),
        Head("Ack floor", numeric=True),
        Head("Pending", numeric=True),
        Head("Unanswered", numeric=True),
        Head("Redelivered", numeric=True),
        Head("Rate", numeric=True),
    )
    rows = [
        (
            each.durable,
            number(each.ack_floor),
            "keeps its newest" if each.keeps_newest else number(each.pending),
            number(each.unanswered),
            number(each.redelivered),
            rate(history.of("floor", name, each.durable).rate(now)),
        )
        for each in readers
    ]
    return f"{told}<h3 style='margin-top:16px'>Readers</h3>{html.table(heads, rows, label='Readers')}"
