"""The page of dead letters: find and read them, retry or discard one or many."""

from collections.abc import Sequence

from nicegui import ui

from purveyor.app.console import html
from purveyor.app.console.console import Console
from purveyor.app.console.formatting import format_ago, format_count, format_number, format_time
from purveyor.app.console.html import TableColumn
from purveyor.app.console.page_base import (
    ConsolePage,
    LiveHtml,
    button,
    card,
    confirm,
    modal,
    notify_error,
    page_frame,
)
from purveyor.app.console.pages.queue_browser import action_link, format_body, label_cells
from purveyor.app.console.snapshot import SystemSnapshot
from purveyor.delivery.dead_letters.park import Attempt, attempts_of
from purveyor.delivery.dead_letters.service import DeadLetterFilter, DeadLetters, Report
from purveyor.model.errors import PurveyorError
from purveyor.queues.dead_letters.store import ParkedMessage

_ROWS = 25


def install(console: Console) -> None:
    """Register the page."""

    @ui.page("/console/dead-letters", title="Dead letters · Purveyor")
    async def dead_letters(subscription: str = "") -> None:
        here = "/console/dead-letters"
        text = "Messages that could not be processed, each with its reason. Retry puts them back."
        with page_frame(console, here, "Dead letters", text) as page, card():
            shown = _DeadLetterList(page, subscription)
        page.on_snapshot(shown.update)
        await page.begin()
        ui.timer(0, shown.read, once=True)


class _DeadLetterList:
    """The list, the selection, and the actions on it."""

    def __init__(self, page: ConsolePage, subscription: str) -> None:
        self._page = page
        self._letters: Sequence[ParkedMessage] = ()
        self._picked: set[int] = set()
        self._after: list[int] = [0]
        self._more: int | None = None
        self._count = -1
        with ui.element("div").classes("bar"):
            self._subscription = _field("Subscription", self._filtered, subscription).classes("filter")
            self._origin = _field("Given up by", self._filtered)
            self._reason = _field("Reason contains", self._filtered)
        with ui.element("div").classes("bar"):
            self._retry = button("Retry picked", self._on_retry, kind="main", hint="Put them back where they came from")
            self._discard = button("Discard picked …", self._on_discard, kind="plain danger")
            ui.element("span").classes("grow")
            self._all_retry = button("Retry all that match …", self._on_retry_all)
            self._all_discard = button("Discard all that match …", self._on_discard_all, kind="plain danger")
        self._live = LiveHtml()
        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            self._back = button("Back", self._on_back)
            self._on = button("Next", self._on_next)
        page.on_action("letter", self._open)
        page.on_action("pick", self._pick)
        page.on_action("pick-all", self._pick_all)

    async def update(self, snapshot: SystemSnapshot) -> None:
        """Read the list again when the number of dead letters has changed."""
        if self._count not in (-1, snapshot.dead_letter_total):
            await self.read()
        self._count = snapshot.dead_letter_total

    @property
    def _choice(self) -> DeadLetterFilter:
        def text(field: ui.input) -> str | None:
            return str(field.value or "").strip() or None

        return DeadLetterFilter(
            subscription=text(self._subscription), origin=text(self._origin), reason=text(self._reason)
        )

    async def read(self) -> None:
        """Read and show a page."""
        try:
            letters = self._service()
            page = await letters.list(self._choice, after=self._after[-1], limit=_ROWS)
        except PurveyorError as error:
            self._letters, self._more = (), None
            self._live.show(html.empty("Nothing to show", str(error)))
            self._enable()
            return
        self._letters, self._more = page.letters, page.next
        self._picked &= {each.id for each in page.letters}
        self._draw()

    def _service(self) -> DeadLetters:
        return self._page.console.services.dead_letters

    def _draw(self) -> None:
        self._live.show(_table(self._letters, self._picked, filtered=self._choice != DeadLetterFilter()))
        self._enable()

    def _enable(self) -> None:
        for each in (self._retry, self._discard):
            each.set_enabled(bool(self._picked))
        for each in (self._all_retry, self._all_discard):
            each.set_enabled(bool(self._letters))
        self._back.set_visibility(len(self._after) > 1)
        self._on.set_visibility(self._more is not None)

    async def _filtered(self) -> None:
        self._after = [0]
        self._picked.clear()
        await self.read()

    async def _on_next(self) -> None:
        if self._more is not None:
            self._after.append(self._more)
            await self.read()

    async def _on_back(self) -> None:
        if len(self._after) > 1:
            self._after.pop()
        await self.read()

    async def _pick(self, key: str) -> None:
        self._picked ^= {int(key)} if key.isdecimal() else set()
        self._draw()

    async def _pick_all(self, _key: str) -> None:
        there = {each.id for each in self._letters}
        self._picked = set() if there <= self._picked else there
        self._draw()

    async def _on_retry(self) -> None:
        await self._do(DeadLetterFilter(ids=tuple(sorted(self._picked))), discard=False)

    async def _on_discard(self) -> None:
        await self._do(DeadLetterFilter(ids=tuple(sorted(self._picked))), discard=True)

    async def _on_retry_all(self) -> None:
        await self._do(self._choice, discard=False, ask=True)

    async def _on_discard_all(self) -> None:
        await self._do(self._choice, discard=True, ask=True)

    async def _do(self, choice: DeadLetterFilter, *, discard: bool, ask: bool = False) -> bool:
        """Plan the action, ask for confirmation, run it, and report the result."""
        try:
            letters = self._service()
            plan = await (letters.discard if discard else letters.retry)(choice, dry_run=True)
        except PurveyorError as error:
            notify_error(error)
            return False
        title, text = _question(plan, discard=discard)
        if (discard or ask) and not await confirm(title, text, yes="Discard" if discard else "Retry", danger=discard):
            return False
        report = Report()

        async def work() -> None:
            nonlocal report
            letters = self._service()
            report = await (letters.discard if discard else letters.retry)(choice)

        if not await self._page.run_action(work, "Discarded" if discard else "Put back"):
            return False
        if report.failed:
            first = report.failed[0]
            why = f"{first.message}. Next: {first.fix}" if first.fix else first.message
            ui.notify(
                f"{format_count(len(report.failed), 'letter')} stay: {why}",
                type="warning",
                position="top",
                timeout=12_000,
            )
        self._picked.clear()
        await self.read()
        return True

    async def _open(self, key: str) -> None:
        found = next((each for each in self._letters if str(each.id) == key), None)
        if found is None:
            return
        one = DeadLetterFilter(ids=(found.id,))
        async with modal(f"Dead letter {found.id}") as dialog:
            _show(found)

            async def settle(discard: bool) -> None:
                if await self._do(one, discard=discard):
                    dialog.close()

            with ui.element("div").classes("bar"):
                button("Discard …", lambda: settle(True), kind="plain danger")
                ui.element("span").classes("grow")
                button("Close", dialog.close).props("autofocus")
                button("Retry", lambda: settle(False), kind="main")


def _field(label: str, changed: object, value: str = "") -> ui.input:
    return ui.input(label, value=value, on_change=changed).props("outlined dense clearable debounce=300")  # type: ignore[arg-type]


def _question(plan: Report, *, discard: bool) -> tuple[str, str]:
    if discard:
        what = format_count(plan.chosen, "dead letter")
        return f"Discard {what}?", "They are removed for good. A record of each, with its reason, stays."
    ways = ", ".join(f"{format_number(count)} to {subject}" for subject, count in plan.targets.items())
    stay = (
        f" {format_count(len(plan.failed), 'letter')} cannot be put back: {plan.failed[0].message}."
        if plan.failed
        else ""
    )
    return f"Put {format_count(plan.chosen, 'dead letter')} back?", f"{ways or 'None can be put back'}.{stay}"


def _table(letters: Sequence[ParkedMessage], picked: set[int], *, filtered: bool) -> str:
    if not letters:
        if filtered:
            return html.empty("No match", "Change the filter.")
        return html.empty("No dead letters", "Everything was processed. No action is needed.")
    every = all(each.id in picked for each in letters)
    heads = (
        TableColumn("Letter", numeric=True),
        TableColumn("Reason", shape="prose"),
        TableColumn("Topic", shape="name"),
        TableColumn("Key", shape="name"),
        TableColumn("Given up by", shape="name"),
        TableColumn("Attempts", numeric=True),
        TableColumn("When", shape="tight"),
        TableColumn("Picked"),
    )
    rows = [
        (
            action_link(str(each.id), "letter", str(each.id)),
            each.reason,
            *label_cells(each.data, most=20),
            html.cut(each.origin, most=22),
            None if each.letter is None else format_number(each.letter.attempts),
            format_ago(each.letter.failed_last if each.letter is not None else each.at),
            _box(each.id, checked=each.id in picked),
        )
        for each in letters
    ]
    all_box = html.Markup(
        '<label class="soft"><input type="checkbox" data-act="pick-all" data-key="all"'
        f"{' checked' if every else ''}> pick all on this page</label>"
    )
    return all_box.text + html.table(heads, rows, label="Dead letters")


def _box(number_: int, *, checked: bool) -> html.Markup:
    mark = " checked" if checked else ""
    return html.Markup(
        f'<input type="checkbox" data-act="pick" data-key="{number_}" aria-label="Pick letter {number_}"{mark}>'
    )


def _show(found: ParkedMessage) -> None:
    letter = found.letter
    rows: list[tuple[str, html.Cell]] = [("Reason", found.reason), ("Given up by", found.origin)]
    if letter is not None:
        rows += [
            ("Subject", letter.subject),
            ("Sequence", None if letter.position is None else format_number(letter.position)),
            ("Attempts", format_number(letter.attempts)),
            ("Failed first", format_time(letter.failed_first)),
            ("Failed last", format_time(letter.failed_last)),
        ]
        rows += [
            (name.capitalize().replace("_", " "), str(value))
            for name, value in letter.details.items()
            if name != "attempts_log"
        ]
    ui.html(html.pairs(rows), sanitize=False)
    noted = attempts_of(found)
    if noted:
        ui.html(f"<h3>Attempts</h3>{attempts_table(noted)}", sanitize=False)
    headers = {} if letter is None else letter.headers
    header_text = "\n".join(f"{name}: {value}" for name, values in sorted(headers.items()) for value in values)
    if header_text:
        ui.html(f"<h3>Headers</h3>{html.preformatted(header_text)}", sanitize=False)
    ui.html(f"<h3>Content</h3>{html.preformatted(format_body(found.data))}", sanitize=False)


def attempts_table(noted: Sequence[Attempt]) -> str:
    """Return a table of failed deliveries."""
    heads = (
        TableColumn("When"),
        TableColumn("Status", numeric=True),
        TableColumn("Error", shape="prose"),
        TableColumn("Answer", shape="prose"),
    )
    rows = [
        (format_time(each.time), None if each.status is None else str(each.status), each.error, each.excerpt)
        for each in noted
    ]
    return html.table(heads, rows, label="Attempts")
