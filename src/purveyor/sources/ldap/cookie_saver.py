"""Stores the cookie of a run: the newest place that the queue has acknowledged, not every one."""

import asyncio
from typing import Final

from purveyor.model.errors import PurveyorError, Unavailable, UnknownKey
from purveyor.sources.ldap.directory import Directory, Mode
from purveyor.sources.ldap.source_store import HeldSource, SourceState
from purveyor.sources.ldap.sync_session import Place

_RETRY_SECONDS: Final = 1.0


class RefreshRequested(PurveyorError):
    """An operator deleted the stored cookie."""

    def __init__(self) -> None:
        super().__init__("the stored cookie was deleted: a full refresh begins")


class CookieSaver:
    """Stores places while `run` runs. While it stores one, others may come: it continues with the last of them."""

    def __init__(self, directory: Directory, taken: HeldSource, mode: Mode) -> None:
        self._directory = directory
        self._taken = taken
        self._mode = mode
        self._place: Place | None = None
        self._changed = asyncio.Event()
        self._busy = asyncio.Lock()

    def put(self, place: Place) -> None:
        """Store a place soon."""
        self._place = place
        self._changed.set()

    async def run(self) -> None:
        """Store what was put, without end; RefreshRequested if an operator deletes the cookie."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.save()
            except Unavailable:
                await asyncio.sleep(_RETRY_SECONDS)
                self._changed.set()

    async def save(self) -> None:
        """Store the place that was put last, unless it is stored."""
        async with self._busy:
            place = self._place
            if place is None:
                return
            await self._store(place)
            if self._place is place:
                self._place = None

    async def forget(self) -> None:
        """Remove the stored cookie, before a full refresh begins: a crash in it must not continue from the cookie."""
        async with self._busy:
            self._place = None
            if self._taken.state is not None and self._taken.state.cookie is not None:
                await self._store(Place(None, None))

    async def _store(self, place: Place) -> None:
        directory = self._directory
        state = SourceState(
            uri=directory.uri,
            base=directory.base,
            filter=directory.filter,
            mode=self._mode,
            epoch=self._taken.epoch,
            cookie=place.cookie,
            entries=place.entries,
        )
        try:
            await self._taken.save(state)
        except UnknownKey:
            raise RefreshRequested from None
