"""The attempt log on the page of a push subscription: search by key and time, and retry or replay from an attempt."""

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

from nicegui import ui

from purveyor.app.cli.parsers import parse_duration
from purveyor.app.console import html
from purveyor.app.console.alerts import Level
from purveyor.app.console.form_values import error_text
from purveyor.app.console.formatting import format_ago, format_number, format_time
from purveyor.app.console.html import Markup, TableColumn, copy_button, copyable
from purveyor.app.console.page_base import ConsolePage, LiveHtml, button, card, modal
from purveyor.app.console.pages.queue_browser import action_link, format_body
from purveyor.delivery.push.attempt_history import read_attempts
from purveyor.delivery.push.attempt_record import AttemptPage, AttemptQuery, PushAttempt, parse_attempt_id
from purveyor.delivery.push.settlement import Action
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.errors import InvalidInput, PurveyorError, UnknownMessage, UnknownStream
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.registry import Registered

ROWS: Final = 15
_READ_SECONDS: Final = 5.0
"""The first page is read again after this time: a log of full size takes some work to read."""
_FIELD: Final = "outlined dense clearable"
_OUTCOMES: Final = {"": "All attempts", "failed": "Failed", "acknowledged": "Acknowledged"}
_THEN: Final = {
    Action.ACKNOWLEDGE: "done",
    Action.RETRY: "sent again later",
    Action.GIVE_UP: "dead letter",
    Action.DISABLE: "subscription paused",
}


class AttemptLogCard:
    """The card with the search and the attempts. It is hidden for subscriptions that are not pushed."""

    def __init__(self, page: ConsolePage) -> None:
        self._page = page
        self._registered: Registered | None = None
        self._shown: AttemptPage = AttemptPage()
        self._before: list[str] = []
        """The ends of the pages that were turned over."""
        self._read_at = 0.0
        self._element = ui.element("div").style("width:100%")
        with self._element, card("Attempts", "The last attempts to push a message, and what the endpoint answered."):
            with ui.element("div").classes("search"):
                self._key = ui.input("Key contains", on_change=self._search).props(f"{_FIELD} debounce=300")
                self._since = ui.input("From", placeholder="1h, or a time", on_change=self._search)
                self._until = ui.input("To", placeholder="now", on_change=self._search)
                self._outcome = ui.select(_OUTCOMES, value="", label="Outcome", on_change=self._search)
            for each in (self._since, self._until):
                each.props(f"{_FIELD} debounce=500")
            self._outcome.props("outlined dense options-dense")
            self._table = LiveHtml()
            with ui.element("div").classes("bar") as self._bar:
                self._remark = ui.label().classes("soft")
                ui.element("span").classes("grow")
                self._back = button("Newer", self._on_back)
                self._on = button("Older", self._on_next)
        self._element.set_visibility(False)
        page.on_action("push-attempt", self._open)

    async def update(self, found: Registered | None) -> None:
        """Set the subscription, and read the newest attempts again from time to time."""
        self._registered = found
        self._element.set_visibility(found is not None and found.record.definition.push is not None)
        if self._element.visible and not self._before and time.monotonic() - self._read_at >= _READ_SECONDS:
            await self._read()

    async def _search(self) -> None:
        self._before.clear()
        await self._read()

    async def _on_next(self) -> None:
        if self._shown.next is not None:
            self._before.append(self._shown.next)
            await self._read()

    async def _on_back(self) -> None:
        if self._before:
            self._before.pop()
        await self._read()

    async def _read(self) -> None:
        query = self._query()
        if query is None or self._registered is None:
            return
        self._read_at = time.monotonic()
        try:
            self._shown = await read_attempts(self._page.console.services.queues, self._registered, query)
        except PurveyorError as error:
            self._table.show(html.empty("Cannot read the attempts", str(error)))
            return
        self._table.show(_table(self._shown.attempts, is_search=query != AttemptQuery(limit=ROWS)))
        self._remark.set_text(_remark(self._shown))
        self._back.set_visibility(bool(self._before))
        self._on.set_visibility(self._shown.next is not None)
        self._bar.set_visibility(bool(self._before or self._shown.next or self._remark.text))

    def _query(self) -> AttemptQuery | None:
        """Return the search; None if a field cannot be read, which then shows why."""
        moments: list[datetime | None] = []
        for each in (self._since, self._until):
            each.error = None
            try:
                moments.append(parse_moment(str(each.value or "")))
            except InvalidInput as error:
                each.error = error_text(error)
        if len(moments) < 2:
            return None
        outcome = str(self._outcome.value or "")
        return AttemptQuery(
            key=str(self._key.value or "").strip() or None,
            since=moments[0],
            until=moments[1],
            is_acknowledged=None if not outcome else outcome == "acknowledged",
            before=parse_attempt_id(self._before[-1]) if self._before else None,
            limit=ROWS,
        )

    async def _open(self, key: str) -> None:
        found = next((each for each in self._shown.attempts if each.id == key), None)
        if found is not None and self._registered is not None:
            await _show_attempt(self._page, self._registered.name, found)
            await self._read()


def parse_moment(text: str) -> datetime | None:
    """Parse a time, or a duration ago; None for an empty text. A time without a zone is in UTC.

    >>> parse_moment("2026-01-31 12:00"), parse_moment(" ")
    (datetime.datetime(2026, 1, 31, 12, 0, tzinfo=datetime.timezone.utc), None)
    """
    given = text.strip()
    if not given:
        return None
    try:
        found = datetime.fromisoformat(given)
        return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    except ValueError:
        pass
    try:
        return datetime.now(UTC) - parse_duration(given)
    except (InvalidInput, OverflowError):
        raise InvalidInput(f"{given!r} is not a time", fix="write 1h, 2d or 2026-01-31T12:00:00Z") from None


def _remark(page: AttemptPage) -> str:
    parts = []
    if page.omitted:
        parts.append(f"{format_number(page.omitted)} more attempts of this time were counted and not stored.")
    if page.unreadable is not None:
        parts.append(f"A part of the log cannot be read: {page.unreadable}.")
    return " ".join(parts)


def _table(found: tuple[PushAttempt, ...], *, is_search: bool) -> str:
    if not found:
        if is_search:
            return html.empty("No match", "No attempt in the log fulfils these conditions.")
        return html.empty("No attempts", "A push worker (purveyor serve push) logs each attempt here within a second.")
    heads = (
        TableColumn("Time", shape="tight"),
        TableColumn("Result", shape="tight"),
        TableColumn("Duration", numeric=True, narrow=False),
        TableColumn("Attempt", numeric=True, narrow=False, hint="1 for the first attempt of the message"),
        TableColumn("Topic", shape="tight"),
        TableColumn("Key", shape="tight"),
        TableColumn("Position", numeric=True, narrow=False),
        TableColumn("Answer", narrow=False, shape="line"),
    )
    rows = [
        (
            action_link(format_ago(each.time), "push-attempt", each.id),
            _result(each),
            f"{format_number(each.milliseconds)} ms",
            format_number(each.attempt),
            _short(f"{each.realm}:{each.topic}"),
            _short(each.key or "-"),
            format_number(each.position),
            Markup(f'<span class="mono soft">{html.cell(each.excerpt or each.error or "")}</span>'),
        )
        for each in found
    ]
    return html.table(heads, rows, label="Attempts")


def _short(text: str) -> Markup:
    """Return a text that is cut in the table; the dialog of the attempt shows all of it."""
    return Markup(f'<span class="short" title="{html.cell(text)}">{html.cell(text)}</span>')


def _result(each: PushAttempt) -> Markup:
    text = "no answer" if each.status is None else str(each.status)
    return html.badge(text, Level.FINE if each.is_acknowledged else Level.STUCK)


async def _show_attempt(page: ConsolePage, name: str, attempt: PushAttempt) -> None:
    """Show one attempt with its message, if that is still in the queue, and what can be done with it."""
    message = await _find_message(page, name, attempt.sequence)
    async with modal(f"Attempt {attempt.attempt} of message {attempt.sequence}") as dialog:
        ui.html(html.pairs(_details(name, attempt)), sanitize=False)
        answer = attempt.excerpt or attempt.error
        if answer:
            ui.html(f"<h3>Answer</h3>{html.preformatted(answer)}", sanitize=False)
        if message is not None:
            body = format_body(message.data)
            head = f'<div class="copyable apart"><h3>Event</h3>{copy_button(body, "the event").text}</div>'
            ui.html(f"{head}{html.preformatted(body)}", sanitize=False)
        failure = ui.label().classes("form-error").props("role=alert")

        async def retry() -> None:
            pull = page.console.services.pull
            await act(lambda: pull.retry(name, attempt.sequence, delay=0, instance="console"), "It is sent again now")

        async def replay(*, is_only_this: bool) -> None:
            begin, service = attempt.position or 1, page.console.services.subscriptions
            end = begin if is_only_this else None
            await act(lambda: service.replay(name, begin, end), "The replay is requested")

        async def act(work: Callable[[], Awaitable[object]], done: str) -> None:
            failure.set_text("")
            if not page.is_allowed():
                return
            try:
                await work()
            except PurveyorError as error:
                failure.set_text(error_text(error))
                return
            ui.notify(done, type="positive", position="top")
            dialog.close()

        with ui.element("div").classes("bar"):
            if message is not None:
                button("Retry now", retry, kind="main", hint="Send it again without waiting for its next attempt")
            if attempt.position is not None:
                button("Replay this event", lambda: replay(is_only_this=True), hint="Write it to the queue again")
                button("Replay from here", lambda: replay(is_only_this=False), hint="This event and all later ones")
            ui.element("span").classes("grow")
            button("Close", dialog.close).props("autofocus")


async def _find_message(page: ConsolePage, name: str, sequence: int) -> StoredMessage | None:
    try:
        return await page.console.services.queues.streams.get(subscription_queue(name).stream, sequence)
    except (UnknownMessage, UnknownStream):
        return None


def _details(name: str, attempt: PushAttempt) -> list[tuple[str, html.Cell]]:
    position: html.Cell = None
    if attempt.position is not None:
        position = copyable(format_number(attempt.position), str(attempt.position), "the position")
    then: html.Cell = _THEN.get(attempt.action, attempt.action.value)
    if attempt.action is Action.GIVE_UP:
        then = html.link("dead letter", f"/console/dead-letters?subscription={quote(name)}")
    return [
        ("Result", _result(attempt)),
        ("Then", then),
        ("Ended", f"{format_time(attempt.time)}, {format_ago(attempt.time)}"),
        ("Duration", f"{format_number(attempt.milliseconds)} ms"),
        ("Endpoint", attempt.endpoint),
        ("Topic", f"{attempt.realm}:{attempt.topic}"),
        ("Key", None if attempt.key is None else copyable(attempt.key, attempt.key, "the key")),
        ("Event id", copyable(attempt.event_id, attempt.event_id, "the event id")),
        ("Position", position),
    ]
