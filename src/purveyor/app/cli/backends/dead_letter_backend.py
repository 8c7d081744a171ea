"""The dead letters, as `purveyor dlq` reads and settles them, in the form of the HTTP API."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol
from urllib.parse import urlencode

from purveyor.app.cli.backends.api_access import ApiRoutes, part
from purveyor.app.json_views import dead_letter_details, dead_letter_summary, report_json
from purveyor.app.settings import Settings
from purveyor.delivery.dead_letters.service import DeadLetterFilter, DeadLetters, open_dead_letters
from purveyor.model.json_fields import Json
from purveyor.queues.client import Queues

_LISTED_PER_REQUEST: Final = 1000
_SETTLED_PER_REQUEST: Final = 100
"""Few enough that the API answers before the client stops waiting."""


class Settlement(Enum):
    """The action on dead letters."""

    RETRY = "retry"
    DISCARD = "discard"


class DeadLetterBackend(Protocol):
    """The dead letters of a deployment."""

    async def list_letters(self, choice: DeadLetterFilter, after: int, limit: int) -> Json:
        """Return up to `limit` dead letters after one, in the form of `DeadLetterPage`."""
        ...

    async def show(self, number: int, choice: DeadLetterFilter) -> Json:
        """Return a dead letter with its message, in the form of `DeadLetterDetails`."""
        ...

    async def settle(
        self, what: Settlement, choice: DeadLetterFilter, *, dry_run: bool, advance: Callable[[int], None]
    ) -> Json:
        """Put back or discard dead letters; return the result in the form of `ReportBody`.

        `advance` is called with the number of dead letters that are done.
        """
        ...


@dataclass(frozen=True, slots=True)
class DirectDeadLetters:
    """The dead letters in their queue on the NATS server."""

    letters: DeadLetters

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, queues: Queues, settings: Settings) -> AsyncIterator[DeadLetterBackend]:
        """Open the dead letters."""
        async with open_dead_letters(queues, replicas=settings.replicas) as letters:
            yield cls(letters)

    async def list_letters(self, choice: DeadLetterFilter, after: int, limit: int) -> Json:
        """Return dead letters."""
        page = await self.letters.list(choice, after=after, limit=limit)
        return {"dead_letters": [dead_letter_summary(each) for each in page.letters], "next": page.next}

    async def show(self, number: int, choice: DeadLetterFilter) -> Json:
        """Return a dead letter."""
        return dead_letter_details(await self.letters.show(number, choice))

    async def settle(
        self, what: Settlement, choice: DeadLetterFilter, *, dry_run: bool, advance: Callable[[int], None]
    ) -> Json:
        """Put back or discard dead letters."""
        settle = self.letters.retry if what is Settlement.RETRY else self.letters.discard
        report = await settle(choice, dry_run=dry_run, advance=advance)
        return {"dry_run": dry_run, **report_json(report)}


@dataclass(frozen=True, slots=True)
class RemoteDeadLetters:
    """The dead letters over the HTTP API: those of one subscription on its own routes, which its login may use."""

    routes: ApiRoutes

    async def list_letters(self, choice: DeadLetterFilter, after: int, limit: int) -> Json:
        """Return dead letters; the API answers with a limited number at a time."""
        found: list[Json] = []
        next_id: int | None = after
        while next_id is not None and len(found) < limit:
            at_once = min(limit - len(found), _LISTED_PER_REQUEST)
            query = urlencode({**_conditions(choice), "after": next_id, "limit": at_once})
            page: Json = (await self.routes.request("GET", *_path(choice, query))).body
            found += page["dead_letters"]
            next_id = page["next"]
        return {"dead_letters": found, "next": next_id}

    async def show(self, number: int, choice: DeadLetterFilter) -> Json:
        """Return a dead letter."""
        found: Json = (await self.routes.request("GET", *_path(choice), str(number))).body
        return found

    async def settle(
        self, what: Settlement, choice: DeadLetterFilter, *, dry_run: bool, advance: Callable[[int], None]
    ) -> Json:
        """Put back or discard dead letters, some with each request; a repeated request does no harm."""
        limit = _LISTED_PER_REQUEST if dry_run else _SETTLED_PER_REQUEST
        total: Json = {"dry_run": dry_run, "chosen": 0, "done": 0, "gone": 0, "targets": {}, "failed": []}
        next_id: int | None = 0
        while next_id is not None:
            body: Json = {**_conditions(choice), "dry_run": dry_run, "after": next_id, "limit": limit}
            if choice.ids:
                body["ids"] = [*choice.ids]
            if not (choice.ids or choice.reason or choice.origin):
                body["all"] = True
            part_report = await self._send(what, choice, body)
            for name in ("chosen", "done", "gone"):
                total[name] += part_report[name]
            for subject, count in part_report["targets"].items():
                total["targets"][subject] = total["targets"].get(subject, 0) + count
            total["failed"] += part_report["failed"]
            advance(part_report["chosen"])
            next_id = part_report["next"]
        return total

    async def _send(self, what: Settlement, choice: DeadLetterFilter, body: Json) -> Json:
        found: Json
        if what is Settlement.RETRY:
            found = (await self.routes.request("POST", *_path(choice), body=body)).body
        else:
            query = {name: str(value).lower() if isinstance(value, bool) else value for name, value in body.items()}
            found = (await self.routes.request("DELETE", *_path(choice, urlencode(query, doseq=True)))).body
        return found


def _conditions(choice: DeadLetterFilter) -> Json:
    given: Json = {"reason": choice.reason, "origin": choice.origin}
    if choice.origin is not None:
        given["subscription"] = choice.subscription
    return {name: value for name, value in given.items() if value is not None}


def _path(choice: DeadLetterFilter, query: str = "") -> tuple[str, ...]:
    """Return the routes of the subscription, or those of all parts, which also know origins."""
    last = f"dead-letters?{query}" if query else "dead-letters"
    if choice.subscription is None or choice.origin is not None:
        return (last,)
    return "subscriptions", part(choice.subscription), last
