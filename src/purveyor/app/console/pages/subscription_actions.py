"""What can be done with a subscription: pause, resume, replay, prefill again, delete."""

from datetime import UTC, datetime
from typing import Final

from nicegui import ui

from purveyor.app.console.formatting import HINTS
from purveyor.app.console.page_base import Page, button, confirm, sheet
from purveyor.app.console.pages.subscription_forms import test_webhook
from purveyor.model.control_events import Place
from purveyor.model.errors import InvalidInput
from purveyor.model.registration import PrefillStatus
from purveyor.model.subscription import Subscription
from purveyor.queues.registry import Registered, Unreadable

_LIST: Final = "/console/subscriptions"


class Actions:
    """The buttons; those that make no sense now are not there."""

    def __init__(self, page: Page, name: str) -> None:
        self._page, self._name = page, name
        self._definition: Subscription | None = None
        self._unreadable = False
        with ui.element("div").classes("bar") as self._bar:
            self._pause = button("Pause", self._on_pause, hint="Hand out nothing until it is resumed; the queue fills")
            self._resume = button(
                "Resume", self._on_resume, kind="main", hint="Hand out again, and write what was missed"
            )
            self._test = button("Send a test event", self._on_test, hint="To its endpoint alone, past all queues")
            self._replay = button("Replay …", self._on_replay, hint=HINTS["replay"])
            self._prefill = button("Prefill again", self._on_prefill, kind="main", hint=HINTS["prefill"])
            ui.element("span").classes("grow")
            self._delete = button("Delete …", self._on_delete, kind="plain danger")

    def know(self, found: Registered | Unreadable | None) -> None:
        """How it is now. One that this program does not understand can only be deleted."""
        self._bar.set_visibility(found is not None)
        self._unreadable = isinstance(found, Unreadable)
        for each in (self._pause, self._resume, self._test, self._replay, self._prefill):
            each.set_visibility(not self._unreadable)
        if found is None or isinstance(found, Unreadable):
            return
        halted = found.record.paused or found.suspended is not None
        self._definition = found.record.definition
        self._test.set_visibility(found.record.definition.push is not None)
        self._pause.set_visibility(not found.record.paused)
        self._resume.set_visibility(halted)
        self._prefill.set_visibility(found.prefill is not None and found.prefill.status is PrefillStatus.FAILED)

    async def _on_test(self) -> None:
        if self._definition is not None:
            await test_webhook(self._page, self._definition)

    async def _on_pause(self) -> None:
        services = self._page.console.services
        await self._page.act(lambda: services.subscriptions.pause(self._name), f"{self._name} is paused")
        services.pull.forget(self._name)

    async def _on_resume(self) -> None:
        services = self._page.console.services
        await self._page.act(lambda: services.subscriptions.resume(self._name), f"{self._name} goes on")
        services.pull.forget(self._name)

    async def _on_prefill(self) -> None:
        work = self._page.console.services.subscriptions.request_prefill
        await self._page.act(lambda: work(self._name), f"The prefill of {self._name} is asked for again")

    async def _on_replay(self) -> None:
        async with sheet(f"Replay to {self._name}") as dialog:
            ui.label(
                "Events of the past that fit are written to its queue once more, behind what waits there."
            ).classes("soft")
            begin = ui.input("From", placeholder="a position, or 2026-01-31T12:00:00Z").props(
                "outlined dense autofocus"
            )
            end = ui.input("To (empty: up to now)", placeholder="a position or a time").props("outlined dense")

            async def start() -> None:
                async def work() -> None:
                    first = place(str(begin.value or ""))
                    if first is None:
                        raise InvalidInput("no beginning was given", fix="give a position or a time")
                    await self._page.console.services.subscriptions.replay(
                        self._name, first, place(str(end.value or ""))
                    )

                if await self._page.act(work, f"The replay to {self._name} is asked for"):
                    dialog.close()

            with ui.element("div").classes("bar"):
                ui.element("span").classes("grow")
                button("Cancel", dialog.close)
                button("Replay", start, kind="main")

    async def _on_delete(self) -> None:
        text = "It ends with all that waits in its queue, and its consumer is refused. This cannot be undone."
        if self._unreadable:
            text += " This program does not understand its record: an upgraded one could serve it."
        if not await confirm(f"Delete {self._name}?", text, yes="Delete"):
            return

        async def work() -> None:
            services = self._page.console.services
            incarnation = await services.subscriptions.delete(self._name, force=self._unreadable)
            services.pull.forget(self._name)
            services.gate.forget(self._name)
            await services.credentials.remove(self._name, incarnation)

        if await self._page.act(work, f"{self._name} is deleted"):
            ui.navigate.to(_LIST)


def place(text: str) -> Place | None:
    """A position or a time, as somebody types it; None for nothing.

    >>> place("12"), place(" "), place("2026-01-31T12:00")
    (12, None, datetime.datetime(2026, 1, 31, 12, 0, tzinfo=datetime.timezone.utc))
    """
    given = text.strip()
    if not given:
        return None
    if given.isdecimal():
        return int(given)
    try:
        found = datetime.fromisoformat(given)
    except ValueError:
        raise InvalidInput(
            f"{given!r} is neither a position nor a time", fix="write 1200 or 2026-01-31T12:00:00Z"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
