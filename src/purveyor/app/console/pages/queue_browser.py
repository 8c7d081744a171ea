"""The messages of a queue: by pages, one in full, and the head of a subscription's queue. Reading changes nothing.

The head shows which instance has which message, its attempts, and the time of the next one. It comes from the delivery
state and the queue itself.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final

from nicegui import ui

from purveyor.app.console import html
from purveyor.app.console.formatting import format_ago, format_size, format_time
from purveyor.app.console.html import Markup, TableColumn, copy_button
from purveyor.app.console.page_base import ConsolePage, LiveHtml, button, modal
from purveyor.app.console.snapshot import QueueSnapshot
from purveyor.delivery.dead_letters.park import Attempt, as_attempt_log, parse_attempt
from purveyor.delivery.push.push_reports import AttemptLog
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.jetstream.streams import Page as MessagePage
from purveyor.jetstream.streams import PageRequest, StoredMessage, read_page
from purveyor.model import delivery_state
from purveyor.model.delivery_state import DeliveryState, SubjectKind
from purveyor.model.errors import PurveyorError, UnknownKey, UnknownStream, UnreadableRecord
from purveyor.model.event import event_key
from purveyor.queues.catalogue import reserved_names, subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.registry import ACKNOWLEDGED, Registered

MAX_SHOWN_MESSAGES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMessage:
    """A waiting message and the state of its delivery."""

    message: StoredMessage
    kind: SubjectKind
    deliveries: int
    instance: str | None = None
    until: datetime | None = None
    """When the lease ends, or the delay before the next attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueHead:
    """The first messages of a queue, and numbers from the delivery state."""

    messages: tuple[WaitingMessage, ...] = ()
    acknowledged: int = 0
    """The last acknowledged position; 0: none."""
    leased: int = 0
    failed: int = 0
    """The number of waiting messages with failed attempts."""


async def read_queue_head(queues: Queues, found: Registered) -> QueueHead:
    """Read the head of a subscription's queue."""
    state = await _read_state(queues, found)
    queue = subscription_queue(found.name)
    messages: list[WaitingMessage] = []
    for kind in SubjectKind:
        done = state.acked(kind)
        wanted = PageRequest(
            subject=f"{found.name}.{kind.value}", from_sequence=done.floor + 1, count=MAX_SHOWN_MESSAGES
        )
        try:
            page = await read_page(queues, queue.stream, wanted)
        except UnknownStream:
            break
        messages += [_to_waiting(state, each, kind) for each in page.messages if each.sequence not in done]
    return QueueHead(
        messages=tuple(messages[:MAX_SHOWN_MESSAGES]),
        acknowledged=state.position,
        leased=sum(len(lease.sequences) for lease in state.leases),
        failed=len(state.delivery_counts),
    )


async def _read_state(queues: Queues, found: Registered) -> DeliveryState:
    try:
        entry = await (await queues.bucket(ACKNOWLEDGED)).get(found.name)
        state = delivery_state.decode(entry.value)
    except (UnknownKey, UnreadableRecord):  # the page reports an unreadable record itself
        return DeliveryState(incarnation=found.incarnation)
    return state if state.incarnation == found.incarnation else DeliveryState(incarnation=found.incarnation)


def _to_waiting(state: DeliveryState, message: StoredMessage, kind: SubjectKind) -> WaitingMessage:
    lease, wait = state.lease_of(message.sequence), state.delayed.get(message.sequence)
    until = lease.until if lease is not None else wait.until if wait is not None else None
    return WaitingMessage(
        message=message,
        kind=kind,
        deliveries=state.deliveries(message.sequence),
        instance=None if lease is None else lease.instance,
        until=None if until is None else datetime.fromtimestamp(until / 1000, UTC),
    )


async def failed_attempts(queues: Queues, found: Registered, sequence: int) -> list[Attempt]:
    """Return the last failed deliveries of a message, from the delivery state and the attempt log of push."""
    entries = as_attempt_log((await _read_state(queues, found)).failures.get(sequence, ()))
    if found.record.definition.push is not None:
        entries += await AttemptLog(queues).read(found.name, found.incarnation, sequence)
    return [parse_attempt(each) for each in sorted(entries, key=lambda each: str(each.get("time")))]


PAGE_SIZE = 20
_MAX_PREVIEW_CHARACTERS = 120
_API_READABLE = frozenset({"dead-letters"})
"""Internal queues that the API's own user may read."""


@dataclass(frozen=True, slots=True)
class MessageRange:
    """The messages to read: a queue and its first sequence."""

    queue: str
    begin: int = 1

    @property
    def needs_operator(self) -> bool:
        """Whether the API's own NATS user may not read the queue."""
        return self.queue in reserved_names() - _API_READABLE


async def read_messages(queues: Queues, wanted: MessageRange) -> MessagePage:
    """Read a page of messages by direct get: this changes no reader's position."""
    return await read_page(
        queues, f"{STREAM_PREFIX}{wanted.queue}", PageRequest(subject=">", from_sequence=wanted.begin, count=PAGE_SIZE)
    )


def format_body(data: bytes) -> str:
    """Format the content: indented if it is JSON, else as text, else as hexadecimal bytes."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"{format_size(len(data))} of binary data:\n{data[:512].hex(' ')}{' ...' if len(data) > 512 else ''}"
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text


def preview_line(data: bytes) -> str:
    """Format the start of the content in one line."""
    text = " ".join(data[: 4 * _MAX_PREVIEW_CHARACTERS].decode(errors="replace").split())
    return text if len(text) <= _MAX_PREVIEW_CHARACTERS else f"{text[:_MAX_PREVIEW_CHARACTERS]}…"


def format_headers(message: StoredMessage) -> str:
    """Format the headers, one on each line."""
    return "\n".join(f"{name}: {value}" for name, values in sorted(message.headers.items()) for value in values)


def describe_message(message: StoredMessage) -> list[tuple[str, str]]:
    """Return the metadata of a message."""
    label = read_label(message.data)
    return [
        ("Sequence", str(message.sequence)),
        ("Subject", message.subject),
        ("Topic", label.topic or "-"),
        ("Key", label.key or "-"),
        ("Stored", format_time(message.timestamp)),
        ("Size", format_size(len(message.data))),
    ]


class MessageBrowser:
    """The message browser on the page of a queue."""

    def __init__(self, page: ConsolePage, queue: str) -> None:
        self._page = page
        self._shown_range = MessageRange(queue)
        self._facts: QueueSnapshot | None = None
        self._messages: tuple[StoredMessage, ...] = ()
        with ui.element("div").classes("bar"):
            self._begin = (
                ui.number("From sequence", value=1, min=1, precision=0).props("outlined dense").style("width:160px")
            )
            button("Show", self._jump, hint="The messages from this sequence on")
            ui.element("span").classes("grow")
            button("Oldest", lambda: self.read(MessageRange(queue)))
            button("Newest", self._newest)
            self._on = button("Next", self._next)
        self._live = LiveHtml()
        page.on_action("message", self._open)

    def update(self, snapshot: QueueSnapshot | None) -> None:
        """Set the current state of the queue."""
        self._facts = snapshot

    async def read(self, wanted: MessageRange) -> None:
        """Read and show a page."""
        self._shown_range = wanted
        try:
            work = partial(read_messages, wanted=wanted)
            console = self._page.console
            found = await (console.as_operator(work) if wanted.needs_operator else work(console.services.queues))
        except PurveyorError as error:
            self._live.show(html.empty("Cannot read the messages", str(error)))
            return
        self._messages = found.messages
        self._on.set_enabled(found.has_more)
        self._live.show(self._table())

    async def _jump(self) -> None:
        await self.read(MessageRange(self._shown_range.queue, max(int(self._begin.value or 1), 1)))

    async def _newest(self) -> None:
        last = self._facts.last_sequence if self._facts is not None else 1
        await self.read(MessageRange(self._shown_range.queue, max(last - PAGE_SIZE + 1, 1)))

    async def _next(self) -> None:
        if self._messages:
            await self.read(MessageRange(self._shown_range.queue, self._messages[-1].sequence + 1))

    def _table(self) -> str:
        if not self._messages:
            return html.empty(
                "No message from here on", "The queue is empty, or all its messages are before this sequence."
            )
        heads = (
            TableColumn("Sequence", numeric=True),
            TableColumn("Stored", shape="tight"),
            TableColumn("Subject", narrow=False, shape="tight"),
            TableColumn("Topic", shape="name"),
            TableColumn("Key", shape="name"),
            TableColumn("Size", numeric=True, narrow=False),
            TableColumn("Content", narrow=False, shape="line"),
        )
        rows = [
            (
                action_link(str(message.sequence), "message", str(message.sequence)),
                format_ago(message.timestamp),
                html.cut(message.subject),
                *label_cells(message.data),
                format_size(len(message.data)),
                Markup(f'<span class="mono soft">{html.cell(preview_line(message.data))}</span>'),
            )
            for message in self._messages
        ]
        return html.table(heads, rows, label="Messages")

    async def _open(self, key: str) -> None:
        found = next((message for message in self._messages if str(message.sequence) == key), None)
        if found is not None:
            await show_message(found)


def label_cells(data: bytes, *, most: int = 36) -> tuple[html.Cell, html.Cell]:
    """Return the cells with the topic and the key of a message, the key in `most` characters: a UUID has 36."""
    label = read_label(data)
    return html.cut(label.topic, most=24), html.cut(label.key, most=most)


def action_link(text: str, act: str, key: str) -> Markup:
    """Return a link that triggers an action of the page."""
    return Markup(
        f'<button type="button" class="link" data-act="{html.cell(act)}" data-key="{html.cell(key)}">'
        f"{html.cell(text)}</button>"
    )


async def show_message(message: StoredMessage, more: str = "") -> None:
    """Show one message in full, with `more` HTML."""
    async with modal(f"Message {message.sequence}") as dialog:
        ui.html(html.pairs(describe_message(message)), sanitize=False)
        if more:
            ui.html(more, sanitize=False)
        headers = format_headers(message)
        if headers:
            ui.html(f"<h3>Headers</h3>{html.preformatted(headers)}", sanitize=False)
        body = format_body(message.data)
        head = f'<div class="copyable apart"><h3>Content</h3>{copy_button(body, "the content").text}</div>'
        ui.html(f"{head}{html.preformatted(body)}", sanitize=False)
        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            button("Close", dialog.close).props("autofocus")


_MAX_LABEL_BYTES: Final = 262_144
"""A larger body is not parsed for a table, which pages draw every second."""


@dataclass(frozen=True, slots=True)
class MessageLabel:
    """The topic, as `realm:topic`, and the key of the object; None where the message has none."""

    topic: str | None = None
    key: str | None = None


def read_label(data: bytes) -> MessageLabel:
    """Return the topic and the key of an event, the name of a job or control event, or the DN of an LDIF record.

    >>> read_label(b'{"realm": "udm", "topic": "users/user", "body": {"old": {}, "new": {"uuid": "u-1"}}}')
    MessageLabel(topic='udm:users/user', key='u-1')
    >>> read_label(b'{"dn": "cn=a", "change": "add"}'), read_label(b"no JSON")
    (MessageLabel(topic=None, key='cn=a'), MessageLabel(topic=None, key=None))
    """
    if len(data) > _MAX_LABEL_BYTES:
        return MessageLabel()
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return MessageLabel()
    if not isinstance(found, dict):
        return MessageLabel()
    realm, topic = found.get("realm"), found.get("topic")
    if isinstance(realm, str) and isinstance(topic, str):
        body = found.get("body")
        old, new = (body.get("old"), body.get("new")) if isinstance(body, dict) else (None, None)
        given = found.get("key")
        key = event_key(
            new if isinstance(new, dict) else {},
            old if isinstance(old, dict) else {},
            given=given if isinstance(given, str) else None,
        )
        return MessageLabel(f"{realm}:{topic}", key)
    return MessageLabel(key=next((found[name] for name in ("name", "dn") if isinstance(found.get(name), str)), None))
