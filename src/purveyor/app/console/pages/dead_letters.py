"""Dead letters: what could not be processed. Find them, read them, put them back or discard them, one or many."""

from collections.abc import Sequence

from nicegui import ui

from purveyor.app.console import html, message_preview
from purveyor.app.console.console import Console
from purveyor.app.console.formatting import ago, moment, number, plural, size
from purveyor.app.console.html import Head
from purveyor.app.console.page_base import (
    Live,
    Page,
    button,
    card,
    complain,
    confirm,
    page_frame,
    sheet,
)
from purveyor.app.console.pages.queue_browser import act_link
from purveyor.app.console.snapshot import Facts
from purveyor.delivery.dead_letters.service import (
    Attempt,
    Choice,
    DeadLetters,
    Report,
    attempts_of,
)
from purveyor.model.errors import PurveyorError
from purveyor.queues.dead_letters.store import Parked

_ROWS = 25


def install(console: Console) -> None:
    """Make it known."""

    @ui.page("/console/dead-letters", title="Dead letters · Purveyor")
    async def dead_letters(subscription: str = "") -> None:
        here = "/console/dead-letters"
        text = "Messages that could not be processed, each with its reason and the way back."
        with page_frame(console, here, "Dead letters", text) as page, card():
            shown = _Letters(page, subscription)
        page.on_facts(shown.know)
        await page.begin()
        ui.timer(0, shown.read, once=True)


class _Letters:
    """The list, what is picked of it, and what is done with that."""

    def __init__(self, page: Page, subscription: str) -> None:
        self._page = page
        self._letters: Sequence[Parked] = ()
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
        self._live = Live()
        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            self._back = button("Back", self._on_back)
            self._on = button("Next", self._on_next)
        page.on_act("letter", self._open)
        page.on_act("pick", self._pick)
        page.on_act("pick-all", self._pick_all)

    async def know(self, facts: Facts) -> None:
        """How many there are now: the list is read again when that changes."""
        if self._count not in (-1, facts.dead):
            await self.read()
        self._count = facts.dead

    @property
    def _choice(self) -> Choice:
        def text(field: ui.input) -> str | None:
            return str(field.value or "").strip() or None

        return Choice(subscription=text(self._subscription), origin=text(self._origin), reason=text(self._reason))

    async def read(self) -> None:
        """Show a page."""
        try:
            async with self._service() as letters:
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
        console = self._page.console
        return DeadLetters(console.services.queues, replicas=console.options.replicas)

    def _draw(self) -> None:
        self._live.show(_table(self._letters, self._picked, filtered=self._choice != Choice()))
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
        await self._do(Choice(ids=tuple(sorted(self._picked))), discard=False)

    async def _on_discard(self) -> None:
        await self._do(Choice(ids=tuple(sorted(self._picked))), discard=True)

    async def _on_retry_all(self) -> None:
        await self._do(self._choice, discard=False, ask=True)

    async def _on_discard_all(self) -> None:
        await self._do(self._choice, discard=True, ask=True)

    async def _do(self, choice: Choice, *, discard: bool, ask: bool = False) -> bool:
        """Say what would be done, ask, do it, and say what came of it."""
        try:
            async with self._service() as letters:
                plan = await (letters.discard if discard else letters.retry)(choice, dry_run=True)
        except PurveyorError as error:
            complain(error)
            return False
        title, text = _question(plan, discard=discard)
        if (discard or ask) and not await confirm(title, text, yes="Discard" if discard else "Retry", danger=discard):
            return False
        report = Report()

        async def work() -> None:
            nonlocal report
            async with self._service() as letters:
                report = await (letters.discard if discard else letters.retry)(choice)

        if not await self._page.act(work, "Discarded" if discard else "Put back"):
            return False
        if report.failed:
            first = report.failed[0]
            why = f"{first.message}. Next: {first.fix}" if first.fix else first.message
            ui.notify(
                f"{plural(len(report.failed), 'letter')} stay: {why}", type="warning", position="top", timeout=12_000
            )
        self._picked.clear()
        await self.read()
        return True

    async def _open(self, key: str) -> None:
        found = next((each for each in self._letters if str(each.id) == key), None)
        if found is None:
            return
        one = Choice(ids=(found.id,))
        async with sheet(f"Dead letter {found.id}") as dialog:
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
        what = plural(plan.chosen, "dead letter")
        return f"Discard {what}?", "They are removed for good; that they were, and why they came here, stays noted."
    ways = ", ".join(f"{number(count)} to {subject}" for subject, count in plan.targets.items())
    stay = f" {plural(len(plan.failed), 'letter')} cannot go back: {plan.failed[0].message}." if plan.failed else ""
    return f"Put {plural(plan.chosen, 'dead letter')} back?", f"{ways or 'None has a way back'}.{stay}"


def _table(letters: Sequence[Parked], picked: set[int], *, filtered: bool) -> str:
    if not letters:
        if filtered:
            return html.empty("None matches", "Change the filter.")
        return html.empty("No dead letter", "Everything was processed. Nobody has to act.")
    every = all(each.id in picked for each in letters)
    heads = (
        Head("Letter", numeric=True),
        Head("Reason"),
        Head("Given up by"),
        Head("Attempts", numeric=True),
        Head("When"),
        Head("Size", numeric=True, narrow=False),
        Head("Picked"),
    )
    rows = [
        (
            act_link(str(each.id), "letter", str(each.id)),
            each.reason,
            each.origin,
            None if each.letter is None else number(each.letter.attempts),
            ago(each.letter.failed_last if each.letter is not None else each.at),
            size(len(each.data)),
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


def _show(found: Parked) -> None:
    letter = found.letter
    rows: list[tuple[str, html.Cell]] = [("Reason", found.reason), ("Given up by", found.origin)]
    if letter is not None:
        rows += [
            ("Came on", letter.subject),
            ("Sequence", None if letter.position is None else number(letter.position)),
            ("Attempts", number(letter.attempts)),
            ("Failed first", moment(letter.failed_first)),
            ("Failed last", moment(letter.failed_last)),
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
    told = "\n".join(f"{name}: {value}" for name, values in sorted(headers.items()) for value in values)
    if told:
        ui.html(f"<h3>Headers</h3>{html.preformatted(told)}", sanitize=False)
    ui.html(f"<h3>Content</h3>{html.preformatted(message_preview.body(found.data))}", sanitize=False)


def attempts_table(noted: Sequence[Attempt]) -> str:
    """Deliveries that failed, one by one."""
    heads = (Head("When"), Head("Status", numeric=True), Head("Error"), Head("Answer", narrow=False))
    rows = [
        (moment(each.time), None if each.status is None else str(each.status), each.error, each.excerpt)
        for each in noted
    ]
    return html.table(heads, rows, label="Attempts")
