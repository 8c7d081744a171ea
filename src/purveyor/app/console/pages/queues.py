"""The queues page: the state and readers of each queue, its messages, and the plan to match its declaration."""

import asyncio
from collections.abc import Sequence
from urllib.parse import quote

from nicegui import ui

from purveyor.app.console import html
from purveyor.app.console.alerts import Level
from purveyor.app.console.console import Console
from purveyor.app.console.formatting import format_duration, format_number, format_rate, format_size
from purveyor.app.console.html import TableColumn
from purveyor.app.console.page_base import (
    ConsolePage,
    LiveHtml,
    PagedTable,
    button,
    card,
    confirm,
    notify_error,
    page_frame,
)
from purveyor.app.console.pages.queue_browser import MessageBrowser, MessageRange
from purveyor.app.console.snapshot import QueueKind, QueueSnapshot, SystemSnapshot
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.model.errors import InvalidName, PurveyorError
from purveyor.queues.catalogue import Queue, internal_queues, subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.migration.events import MigrationOptions, Progress
from purveyor.queues.migration.plan import Change, Plan
from purveyor.queues.migration.record import QueueStatus

_ORDER = {QueueKind.INTERNAL: 0, QueueKind.STAGE: 1, QueueKind.SUBSCRIPTION: 2}


def install(console: Console) -> None:
    """Register the page."""

    @ui.page("/console/queues", title="Queues · Purveyor")
    async def queues(queue: str = "") -> None:
        here = "/console/queues"
        with page_frame(console, here, "Queues", "Between two parts, messages wait in a queue.") as page:
            with card(f"Queue {queue}" if queue else "All queues"):
                if queue:
                    one = LiveHtml()
                else:
                    listing = PagedTable[QueueSnapshot](
                        "queues", _matches, lambda rows: _queue_table(rows, latest, console)
                    )
            if queue:
                with card("Messages", "Reading them here consumes nothing and changes no reader's position."):
                    browser = MessageBrowser(page, queue)
            with card("Declaration", "The changes that bring queues to the declaration of this version."):
                Migration(page, queue or None)
        latest: list[SystemSnapshot] = []

        def show(snapshot: SystemSnapshot) -> None:
            latest[:] = [snapshot]
            if queue:
                one.show(_detail(snapshot, queue, console))
                browser.update(snapshot.queues.get(queue))
            else:
                found = sorted(snapshot.queues.values(), key=lambda each: (_ORDER[each.kind], each.name))
                listing.show(found)

        page.on_snapshot(show)
        await page.begin()
        if queue:
            ui.timer(0, lambda: browser.read(MessageRange(queue)), once=True)


def _matches(row: QueueSnapshot, text: str) -> bool:
    return text in row.name.lower() or text in row.kind.value


def _queue_table(rows: Sequence[QueueSnapshot], known: Sequence[SystemSnapshot], console: Console) -> str:
    if not known:
        return ""
    snapshot, history = known[0], console.collector.history
    if not rows:
        return html.empty("No queues", "The first part that starts creates them.")
    now = snapshot.at.timestamp()
    heads = (
        TableColumn("Queue"),
        TableColumn("Kind", narrow=False),
        TableColumn("State", narrow=False),
        TableColumn("Messages", numeric=True),
        TableColumn("Oldest", numeric=True),
        TableColumn("In", numeric=True, hint="Messages stored per second"),
        TableColumn("Out", numeric=True, hint="Messages removed per second"),
        TableColumn("Size", numeric=True, narrow=False),
        TableColumn("Readers", numeric=True, narrow=False, hint="Durables. The API reads the queues of subscriptions"),
    )
    return html.table(
        heads,
        [
            (
                html.link(row.name, f"/console/queues?queue={quote(row.name)}"),
                row.kind.value,
                _state(row),
                format_number(row.messages),
                _age(row, snapshot),
                format_rate(history.of("last", row.name).rate(now)),
                format_rate(history.of("done", row.name).rate(now)),
                format_size(row.bytes),
                str(row.consumers) if row.kind is not QueueKind.SUBSCRIPTION else None,
            )
            for row in rows
        ],
        label="Queues",
    )


def _state(row: QueueSnapshot) -> html.Markup:
    return html.badge("sealed", Level.WARNING) if row.sealed else html.badge("open")


def _age(row: QueueSnapshot, snapshot: SystemSnapshot) -> str:
    return format_duration(None if row.oldest is None else max((snapshot.at - row.oldest).total_seconds(), 0.0))


def _detail(snapshot: SystemSnapshot, name: str, console: Console) -> str:
    row = snapshot.queues.get(name)
    if row is None:
        return html.empty(f"There is no queue {name}", "It was removed, or does not exist yet.")
    history, now = console.collector.history, snapshot.at.timestamp()
    summary = html.pairs(
        [
            ("Kind", row.kind.value),
            ("State", _state(row)),
            ("Messages", format_number(row.messages)),
            ("Size", format_size(row.bytes)),
            ("Oldest", _age(row, snapshot)),
            ("Last sequence", format_number(row.last_sequence)),
            ("In", format_rate(history.of("last", name).rate(now))),
            ("Out", format_rate(history.of("done", name).rate(now))),
        ]
    )
    readers = snapshot.readers.get(name, ())
    if not readers:
        return summary
    heads = (
        TableColumn("Durable"),
        TableColumn("Ack floor", numeric=True),
        TableColumn("Pending", numeric=True),
        TableColumn("Unanswered", numeric=True),
        TableColumn("Redelivered", numeric=True),
        TableColumn("Rate", numeric=True),
    )
    rows = [
        (
            each.durable,
            format_number(each.ack_floor),
            "keeps its newest" if each.keeps_newest else format_number(each.pending),
            format_number(each.unanswered),
            format_number(each.redelivered),
            format_rate(history.of("floor", name, each.durable).rate(now)),
        )
        for each in readers
    ]
    return f"{summary}<h3 style='margin-top:16px'>Readers</h3>{html.table(heads, rows, label='Readers')}"


_LEVELS = {
    Change.NOTHING: Level.FINE,
    Change.CREATE: Level.NOTE,
    Change.UPDATE: Level.NOTE,
    Change.BLOCKED: Level.STUCK,
}


class Migration:
    """Plan and apply on the queues page."""

    def __init__(self, page: ConsolePage, queue: str | None) -> None:
        self._page = page
        self._queue = queue
        self._plans: Sequence[Plan] = ()
        self._applying = False
        with ui.element("div").classes("bar"):
            button("Plan", self._plan, hint="Show the changes without applying them")
            self._apply_button = button("Apply", self._apply, kind="main", hint="Apply the plan")
            self._progress_label = ui.label().classes("soft")
        self._apply_button.set_enabled(False)
        self._live = LiveHtml()

    async def _plan(self) -> None:
        try:
            self._plans = await self._page.console.as_operator(self._make_plans)
        except PurveyorError as error:
            notify_error(error)
            return
        todo = [plan for plan in self._plans if plan.change is not Change.NOTHING]
        self._apply_button.set_enabled(any(plan.change is not Change.BLOCKED for plan in todo))
        if not todo:
            self._live.show(html.empty("Nothing to do", "Every queue is as this version declares it."))
        else:
            self._live.show(_plan_table(todo))

    async def _make_plans(self, queues: Queues) -> list[Plan]:
        options = self._page.console.options
        known = {queue.name: queue for queue in internal_queues((options.group,))}
        if self._queue is None or self._queue not in known:
            names = (
                [self._queue] if self._queue else [n.removeprefix(STREAM_PREFIX) for n in await queues.streams.names()]
            )
            known |= {queue.name: queue for queue in _subscriptions(names)}
        wanted = list(known.values()) if self._queue is None else [q for n, q in known.items() if n == self._queue]
        return [await queues.migrations.plan(queue, replicas=options.replicas) for queue in wanted]

    async def _apply(self) -> None:
        todo = [plan for plan in self._plans if plan.change not in (Change.NOTHING, Change.BLOCKED)]
        if self._applying or not todo:
            return
        hard = [plan for plan in todo if plan.needs_migration]
        risks = " ".join(f"{plan.queue.name}: {'; '.join(plan.risks or plan.why)}." for plan in hard)
        names = ", ".join(plan.queue.name for plan in todo)
        text = f"{names} will be changed to match the declaration. {risks}".strip()
        if not await confirm("Apply the plan?", text, yes="Apply", danger=bool(hard)):
            return
        self._applying = True
        self._apply_button.set_enabled(False)
        try:
            done = await self._page.run_action(
                lambda: self._page.console.as_operator(self._work), f"Applied to {names}"
            )
        finally:
            self._applying = False
            self._progress_label.set_text("")
        if done:
            await self._plan()

    async def _work(self, queues: Queues) -> None:
        options = self._page.console.options
        loop = asyncio.get_running_loop()

        def show_progress(progress: Progress) -> None:
            share = f" {100 * progress.done // progress.total} %" if progress.total else ""
            loop.call_soon_threadsafe(self._progress_label.set_text, f"{progress.queue}: {progress.what}{share}")

        archives = options.data_dir / "migrations"
        migrations = queues.migrations.with_options(MigrationOptions(archives=archives, on_progress=show_progress))
        for plan in self._plans:
            if plan.change in (Change.NOTHING, Change.BLOCKED):
                continue
            if plan.needs_migration:
                status = await migrations.begin(
                    plan.queue, replicas=options.replicas, strategy=plan.choose_strategy(None)
                )
                if status is not QueueStatus.READY:
                    await migrations.wait_until_done(plan.queue.name)
            (await queues.ensure(plan.queue, replicas=options.replicas)).require_ready()


def _subscriptions(names: Sequence[str]) -> list[Queue]:
    found: list[Queue] = []
    for name in names:
        try:
            found.append(subscription_queue(name))
        except InvalidName:
            continue  # an internal queue, a stage queue, or a foreign stream
    return found


def _plan_table(plans: Sequence[Plan]) -> str:
    heads = (
        TableColumn("Queue"),
        TableColumn("Applying would"),
        TableColumn("Messages", numeric=True),
        TableColumn("Why", shape="prose"),
        TableColumn("Risks", shape="prose"),
    )
    rows = [
        (
            plan.queue.name,
            html.badge(plan.change.value, _LEVELS.get(plan.change, Level.WARNING)),
            format_number(plan.messages),
            "; ".join(plan.why) or None,
            "; ".join(plan.risks) or None,
        )
        for plan in plans
    ]
    return html.table(heads, rows, label="The plan")
