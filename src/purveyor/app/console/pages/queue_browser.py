"""The messages of a queue, a page at a time, and one of them in full."""

from functools import partial

from nicegui import ui

from purveyor.app.console import html, message_preview
from purveyor.app.console.formatting import ago, size
from purveyor.app.console.html import Head, Markup
from purveyor.app.console.message_preview import Look
from purveyor.app.console.page_base import Live, Page, button, sheet
from purveyor.app.console.snapshot import QueueFacts
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.errors import PurveyorError


class Browser:
    """A part of the page of a queue."""

    def __init__(self, page: Page, queue: str) -> None:
        self._page = page
        self._look = Look(queue)
        self._facts: QueueFacts | None = None
        self._messages: tuple[StoredMessage, ...] = ()
        with ui.element("div").classes("bar"):
            self._begin = (
                ui.number("From sequence", value=1, min=1, precision=0).props("outlined dense").style("width:160px")
            )
            button("Look", self._jump, hint="The messages from this sequence on")
            ui.element("span").classes("grow")
            button("Oldest", lambda: self.read(Look(queue)))
            button("Newest", self._newest)
            self._on = button("Next", self._next)
        self._live = Live()
        page.on_act("message", self._open)

    def know(self, facts: QueueFacts | None) -> None:
        """How the queue is now."""
        self._facts = facts

    async def read(self, look: Look) -> None:
        """Show a page."""
        self._look = look
        try:
            work = partial(message_preview.read, look=look)
            console = self._page.console
            found = await (console.as_operator(work) if look.needs_operator else work(console.services.queues))
        except PurveyorError as error:
            self._live.show(html.empty("The messages cannot be read", str(error)))
            return
        self._messages = found.messages
        self._on.set_enabled(found.more)
        self._live.show(self._table())

    async def _jump(self) -> None:
        await self.read(Look(self._look.queue, max(int(self._begin.value or 1), 1)))

    async def _newest(self) -> None:
        last = self._facts.last_sequence if self._facts is not None else 1
        await self.read(Look(self._look.queue, max(last - message_preview.PAGE + 1, 1)))

    async def _next(self) -> None:
        if self._messages:
            await self.read(Look(self._look.queue, self._messages[-1].sequence + 1))

    def _table(self) -> str:
        if not self._messages:
            return html.empty("No message from here on", "The queue is empty, or all of it lies before this sequence.")
        heads = (
            Head("Sequence", numeric=True),
            Head("Stored", shape="tight"),
            Head("Subject", shape="tight"),
            Head("Size", numeric=True),
            Head("Content", narrow=False, shape="line"),
        )
        rows = [
            (
                act_link(str(message.sequence), "message", str(message.sequence)),
                ago(message.timestamp),
                message.subject,
                size(len(message.data)),
                Markup(f'<span class="mono soft">{html.cell(message_preview.preview(message.data))}</span>'),
            )
            for message in self._messages
        ]
        return html.table(heads, rows, label="Messages")

    async def _open(self, key: str) -> None:
        found = next((message for message in self._messages if str(message.sequence) == key), None)
        if found is not None:
            await show_message(found)


def act_link(text: str, act: str, key: str) -> Markup:
    """A word that does something."""
    return Markup(
        f'<button type="button" class="link" data-act="{html.cell(act)}" data-key="{html.cell(key)}">'
        f"{html.cell(text)}</button>"
    )


async def show_message(message: StoredMessage, more: str = "") -> None:
    """One message in full, and what else is known about it."""
    async with sheet(f"Message {message.sequence}") as dialog:
        ui.html(html.pairs(message_preview.about(message)), sanitize=False)
        if more:
            ui.html(more, sanitize=False)
        told = message_preview.headers(message)
        if told:
            ui.html(f"<h3>Headers</h3>{html.preformatted(told)}", sanitize=False)
        ui.html(f"<h3>Content</h3>{html.preformatted(message_preview.body(message.data))}", sanitize=False)
        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            button("Close", dialog.close).props("autofocus")
