"""Plan and apply: what it would take to bring queues to their declaration, and doing it after a question."""

import asyncio
from collections.abc import Sequence

from nicegui import ui

from purveyor.app.console import html
from purveyor.app.console.alerts import Level
from purveyor.app.console.formatting import number
from purveyor.app.console.html import Head
from purveyor.app.console.page_base import Live, Page, button, complain, confirm
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.model.errors import InvalidName, PurveyorError
from purveyor.queues.catalogue import Queue, internal_queues, subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.migration.plan import Change, Plan
from purveyor.queues.migration.record import QueueStatus
from purveyor.queues.migration.steps import Options, Progress

_LEVELS = {
    Change.NOTHING: Level.FINE,
    Change.CREATE: Level.NOTE,
    Change.UPDATE: Level.NOTE,
    Change.BLOCKED: Level.STUCK,
}


class Migration:
    """A part of the page of queues."""

    def __init__(self, page: Page, queue: str | None) -> None:
        self._page = page
        self._queue = queue
        self._plans: Sequence[Plan] = ()
        self._applying = False
        with ui.element("div").classes("bar"):
            button("Plan", self._plan, hint="Show what would be done; changes nothing")
            self._apply_button = button("Apply", self._apply, kind="main", hint="Do what the plan says")
            self._told = ui.label().classes("soft")
        self._apply_button.set_enabled(False)
        self._live = Live()

    async def _plan(self) -> None:
        try:
            self._plans = await self._page.console.as_operator(self._look)
        except PurveyorError as error:
            complain(error)
            return
        todo = [plan for plan in self._plans if plan.change is not Change.NOTHING]
        self._apply_button.set_enabled(any(plan.change is not Change.BLOCKED for plan in todo))
        if not todo:
            self._live.show(html.empty("Nothing to do", "Every queue is as this version declares it."))
        else:
            self._live.show(_table(todo))

    async def _look(self, queues: Queues) -> list[Plan]:
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
        hard = [plan for plan in todo if plan.migrates]
        risks = " ".join(f"{plan.queue.name}: {'; '.join(plan.risks or plan.why)}." for plan in hard)
        names = ", ".join(plan.queue.name for plan in todo)
        text = f"{names} will be brought to the declaration. {risks}".strip()
        if not await confirm("Apply the plan?", text, yes="Apply", danger=bool(hard)):
            return
        self._applying = True
        self._apply_button.set_enabled(False)
        try:
            done = await self._page.act(lambda: self._page.console.as_operator(self._work), f"Applied to {names}")
        finally:
            self._applying = False
            self._told.set_text("")
        if done:
            await self._plan()

    async def _work(self, queues: Queues) -> None:
        options = self._page.console.options
        loop = asyncio.get_running_loop()

        def tell(progress: Progress) -> None:
            share = f" {100 * progress.done // progress.total} %" if progress.total else ""
            loop.call_soon_threadsafe(self._told.set_text, f"{progress.queue}: {progress.what}{share}")

        archives = options.data_dir / "migrations"
        migrations = queues.migrations.with_options(Options(archives=archives, on_progress=tell))
        for plan in self._plans:
            if plan.change in (Change.NOTHING, Change.BLOCKED):
                continue
            if plan.migrates:
                status = await migrations.begin(plan.queue, replicas=options.replicas, strategy=plan.by(None))
                if status is not QueueStatus.READY:
                    await migrations.finish(plan.queue.name)
            (await queues.ensure(plan.queue, replicas=options.replicas)).require_ready()


def _subscriptions(names: Sequence[str]) -> list[Queue]:
    found: list[Queue] = []
    for name in names:
        try:
            found.append(subscription_queue(name))
        except InvalidName:
            continue  # an internal queue, a stage, or somebody else's
    return found


def _table(plans: Sequence[Plan]) -> str:
    heads = (Head("Queue"), Head("Applying would"), Head("Messages", numeric=True), Head("Why"), Head("Mind that"))
    rows = [
        (
            plan.queue.name,
            html.badge(plan.change.value, _LEVELS.get(plan.change, Level.WARNING)),
            number(plan.messages),
            "; ".join(plan.why) or None,
            "; ".join(plan.risks) or None,
        )
        for plan in plans
    ]
    return html.table(heads, rows, label="The plan")
