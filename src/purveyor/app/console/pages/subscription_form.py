"""The form to add or edit a subscription, the dialog that sets its password, and the dialog that shows secrets once.

The form has every option of the HTTP API and sends what a client of the API would send. Each error is shown
at its field.
"""

import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from nicegui import ui
from nicegui.elements.mixins.validation_element import ValidationElement
from pydantic import SecretStr, ValidationError

from purveyor.app.cli.parsers import parse_duration
from purveyor.app.console import html
from purveyor.app.console.form_values import (
    DEFAULT,
    GENERATE,
    GIVEN,
    KEEP,
    NONE,
    FormResult,
    FormValues,
    allowed_orders,
    error_text,
    read_change,
    read_new,
)
from purveyor.app.console.html import copyable_code
from purveyor.app.console.page_base import ConsolePage, button, modal
from purveyor.app.http import subscriptions as api
from purveyor.app.http.models import NewSubscription, SubscriptionChange
from purveyor.model.errors import AlreadyExists, InvalidName, PurveyorError
from purveyor.model.subscription import Subscription

_FIELD: Final = "outlined dense"
_DELIVERY: Final = {
    "ordered": "Fetched, one at a time, in order",
    "parallel": "Fetched by many at once",
    "push": "Push: sent to an endpoint",
}
_FORMATS: Final = {"pubsub": "pubsub: JSON around the event", "raw": "raw: the event", "cloudevents": "CloudEvents"}
_ACK_CODES: Final = {"pubsub": "102, 200, 201, 202, 204", "2xx": "102 and all of 2xx"}
_AFTER: Final = {"continue": "Continue with the next message", "park_key": "Park later messages of the key too"}
_SIGNING: Final = {
    GENERATE: "With a new secret, which is shown once",
    GIVEN: "With this secret",
    NONE: "Not signed",
}
_BEARER: Final = {NONE: "None", GIVEN: "This token"}
_HIDING: Final = {DEFAULT: "Passwords, their hashes and keys", GIVEN: "These fields", NONE: "None"}
_TOKEN_HINT: Final = "or env:PURVEYOR_PUSH_SECRET_..., a variable of the push worker"
_SECRET_HINT: Final = f"whsec_..., {_TOKEN_HINT}"


@dataclass(frozen=True, slots=True)
class ShownOnce:
    """A password or a secret that the console shows only once."""

    title: str
    rows: tuple[tuple[str, str], ...]


async def add_subscription(page: ConsolePage) -> None:
    """Show the form, add the subscription, and show its password once."""
    console, password = page.console, secrets.token_urlsafe(18)

    def read(values: FormValues) -> FormResult:
        return read_new(values, password, console.push)

    async def add(result: FormResult) -> None:
        await api.add(console, NewSubscription.model_validate(result.body))

    result = await _show_form(page, _Purpose("Add a subscription", "Add", read, add))
    if result is not None:
        name = str(result.body["name"])
        await page.refresh(fresh=True)
        await show_once(ShownOnce(f"{name} is added", (("Password", password), *_secret_row(result))))
        ui.navigate.to(f"/console/subscriptions/{name}")


async def edit_subscription(page: ConsolePage, current: Subscription) -> None:
    """Show the form with the options of a subscription, and change those that the operator changes."""
    console = page.console

    def read(values: FormValues) -> FormResult:
        return read_change(values, current, console.push)

    async def change(result: FormResult) -> None:
        if result.body:
            await api.change(console, current.name, SubscriptionChange.model_validate(result.body))

    result = await _show_form(page, _Purpose(f"Edit {current.name}", "Save", read, change, current))
    if result is not None:
        text = f"{current.name} is changed" if result.body else "Nothing was changed"
        ui.notify(text, type="positive" if result.body else "info", position="top")
        await page.refresh(fresh=True)
        if result.secret is not None and "secret" in result.body.get("push", {}):
            await show_once(ShownOnce(f"{current.name} has a new secret", _secret_row(result)))


def _secret_row(result: FormResult) -> tuple[tuple[str, str], ...]:
    return () if result.secret is None else (("Secret to check signatures with", result.secret),)


@dataclass(frozen=True, slots=True)
class _Purpose:
    """The purpose of a form: how its values are read, and how the request is carried out."""

    title: str
    yes: str
    read: Callable[[FormValues], FormResult]
    do: Callable[[FormResult], Awaitable[None]]
    current: Subscription | None = None


async def _show_form(page: ConsolePage, purpose: _Purpose) -> FormResult | None:
    """Show the form until the operator saves or cancels it; return what was done, or None."""
    done: list[FormResult] = []
    async with modal(purpose.title) as dialog:
        form = _Form(purpose.current)
        failure = ui.label().classes("form-error").props("role=alert")

        async def save() -> None:
            failure.set_text("")
            result = purpose.read(form.values())
            errors = dict(result.errors)
            if not errors and page.is_allowed():
                errors = await _try(purpose, result)
            form.show_errors(errors)
            failure.set_text(errors.get("", ""))
            if not errors:
                done.append(result)
                dialog.close()

        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            button("Cancel", dialog.close)
            button(purpose.yes, save, kind="main")
    return done[0] if done else None


async def _try(purpose: _Purpose, result: FormResult) -> dict[str, str]:
    try:
        await purpose.do(result)
    except (InvalidName, AlreadyExists) as error:
        return {"name" if "name" in result.body else "": error_text(error)}
    except PurveyorError as error:
        return {"": error_text(error)}
    return {}


class _Form:
    """The fields. Each has the name of its value in `FormValues`."""

    def __init__(self, current: Subscription | None) -> None:
        self._given = FormValues() if current is None else FormValues.of(current)
        self._is_new = current is None
        self._is_pushed = current is not None and current.push is not None
        self._fields: dict[str, ValidationElement[Any] | ui.checkbox] = {}
        self._what()
        self._delivery()
        self._push()
        with self._more():
            self._retries()
            self._filter()

    def values(self) -> FormValues:
        """Return what the operator has entered."""
        given: dict[str, Any] = {each.name: getattr(self._given, each.name) for each in fields(FormValues)}
        for name, shown in self._fields.items():
            given[name] = bool(shown.value) if isinstance(shown, ui.checkbox) else str(shown.value or "")
        return FormValues(**given)

    def show_errors(self, errors: Mapping[str, str]) -> None:
        """Show each error at its field, and open the part that has one."""
        for name, shown in self._fields.items():
            if isinstance(shown, ValidationElement):
                shown.error = errors.get(name)
        if set(errors) & self._names_of_more:
            self._expansion.open()
        first = next((shown for name, shown in self._fields.items() if name in errors), None)
        if first is not None:
            first.run_method("focus")

    def _what(self) -> None:
        if self._is_new:
            self._text("name", "Name", "letters, digits, - and _").props("autofocus")
        self._lines(
            "topics",
            "Topics",
            "realm:topic, one on each line; a topic may be a regular expression: "
            "udm:users/user, shop:orders/[a-z]{1,3}",
            rows=2,
        )
        if self._is_new:
            self._fields["prefill"] = ui.checkbox(
                "Prefill: deliver the current state of all objects first", value=self._given.prefill
            )
        else:
            self._fields["prefill_new_topics"] = ui.checkbox(
                "Prefill of new topics: deliver the current state of their objects first"
            )

    def _delivery(self) -> None:
        with ui.element("div").classes("columns"):
            delivery = self._select("delivery", "Delivery", _DELIVERY)
            order = self._select("order", "Order that it keeps", allowed_orders(self._given.delivery))

        def changed() -> None:
            allowed = allowed_orders(str(delivery.value))
            order.set_options(allowed, value=next(iter(allowed)))  # the default of the API

        delivery.on_value_change(changed)

    def _push(self) -> None:
        kept = {KEEP: "As it is"} if self._is_pushed else {}
        with ui.element("div").classes("part") as part:
            self._lines("endpoints", "Endpoint", "a URL; several, one on each line, share the messages", rows=1)
            with ui.element("div").classes("columns"):
                self._select("format", "Format", _FORMATS)
                self._select("ack_codes", "Statuses that acknowledge", _ACK_CODES)
                self._text("ack_deadline", "Deadline of an answer", "10s if empty")
                self._select("after_dead_letter", "After a dead letter", _AFTER)
                with ui.element("div").classes("part"):
                    signing = self._select("signing", "Signature", {**kept, **_SIGNING})
                    secret = self._text("secret", "Secret", _SECRET_HINT)
                with ui.element("div").classes("part"):
                    bearer = self._select("bearer", "Bearer token", {**kept, **_BEARER})
                    token = self._text("bearer_token", "Token", _TOKEN_HINT)
            for shown, choice in ((secret, signing), (token, bearer)):
                shown.props("type=password autocomplete=new-password")
                shown.bind_visibility_from(choice, "value", value=GIVEN)
        part.bind_visibility_from(self._fields["delivery"], "value", value="push")

    @contextlib.contextmanager
    def _more(self) -> Iterator[None]:
        known = set(self._fields)
        self._expansion = ui.expansion("Lease, retries, retention, filter, hidden fields").classes("expansion")
        with self._expansion:
            yield
        self._names_of_more = set(self._fields) - known

    def _retries(self) -> None:
        with ui.element("div").classes("columns three"):
            self._text("max_attempts", "Attempts", "no limit if empty; then a dead letter")
            self._text("min_backoff", "First delay", "1s if empty; it doubles")
            self._text("max_backoff", "Longest delay", "10m if empty")
        with ui.element("div").classes("columns"):
            self._text("lease", "Lease", "how long a consumer keeps a message: 30s if empty")
            self._text("retention", "Retention", "messages expire after this time, such as 7d; never if empty")

    def _filter(self) -> None:
        with ui.element("div").classes("columns"):
            self._lines("attributes", "Only events with attributes", "NAME=VALUE, one on each line", rows=2)
            self._lines(
                "fields", "Only objects with fields", "PATH=VALUE, one on each line: address.city=Bremen", rows=2
            )
            hiding = self._select("hiding", "Hidden fields", _HIDING)
            hidden = self._lines("hidden_fields", "Fields to hide", "one on each line", rows=2)
        hidden.bind_visibility_from(hiding, "value", value=GIVEN)

    def _text(self, name: str, label: str, hint: str) -> ui.input:
        made = ui.input(label, value=getattr(self._given, name)).props(_FIELD).props(f'hint="{html.cell(hint)}"')
        self._fields[name] = made
        return made

    def _lines(self, name: str, label: str, hint: str, *, rows: int) -> ui.textarea:
        made = ui.textarea(label, value=getattr(self._given, name)).props(_FIELD)
        made.props(f'hint="{html.cell(hint)}" autogrow input-style="min-height:{rows * 1.6:.1f}em" spellcheck=false')
        self._fields[name] = made
        return made

    def _select(self, name: str, label: str, options: dict[str, str]) -> ui.select:
        value = getattr(self._given, name)
        made = ui.select(options, label=label, value=value if value in options else next(iter(options)))
        made.props(_FIELD).props("options-dense")
        self._fields[name] = made
        return made


async def set_password(page: ConsolePage, name: str) -> None:
    """Ask for a new password, set it, and show it once if it is generated."""
    made: list[str] = []
    async with modal(f"New password of {name}") as dialog:
        ui.label("Its consumer logs in with this password. Tokens end with the old one.").classes("soft")
        password = ui.input("Password").props(f"{_FIELD} autofocus type=password autocomplete=new-password")
        password.props('hint="empty: the console generates one and shows it once"')
        keep = ui.input("The old password stays valid for").props(f'{_FIELD} hint="such as 1h; empty: it ends at once"')
        keep_tokens = ui.checkbox("Tokens stay valid")
        failure = ui.label().classes("form-error").props("role=alert")

        async def save() -> None:
            password.error = keep.error = None
            failure.set_text("")
            given = str(password.value or "") or secrets.token_urlsafe(18)
            try:
                text = str(keep.value or "").strip()
                seconds = parse_duration(text).total_seconds() if text else 0.0
                change = SubscriptionChange(
                    password=SecretStr(given), password_grace_seconds=seconds, keep_tokens=bool(keep_tokens.value)
                )
            except ValidationError as error:
                for each in error.errors():
                    field = password if "password" in each["loc"] else keep
                    field.error = str(each["msg"])
                return
            except PurveyorError as error:
                keep.error = error_text(error)
                return
            if not page.is_allowed():
                return
            try:
                await api.change(page.console, name, change)
            except PurveyorError as error:
                failure.set_text(error_text(error))
                return
            made.append("" if password.value else given)
            dialog.close()

        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            button("Cancel", dialog.close)
            button("Set the password", save, kind="main")
    if made and made[0]:
        await show_once(ShownOnce(f"{name} has a new password", (("Password", made[0]),)))
    elif made:
        ui.notify(f"{name} has a new password", type="positive", position="top")


async def show_once(shown: ShownOnce) -> None:
    """Show passwords and secrets, each with a copy button."""
    async with modal(shown.title) as dialog:
        ui.label("Shown only once. Give it to the consumer.").classes("soft")
        rows = [(name, copyable_code(text, f"the {name.split()[0].lower()}")) for name, text in shown.rows]
        ui.html(f'<div class="lines">{html.pairs(rows)}</div>', sanitize=False)
        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            button("I have it", dialog.close, kind="main").props("autofocus")
