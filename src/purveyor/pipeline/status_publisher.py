"""Puts the pipeline's status on the board, so that the console and others see it from wherever they run.

In a thread of its own: a server that is away must hold up nobody. What cannot be posted is dropped, because the next
status is a second away, and the age of the last one tells the rest.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from purveyor.jetstream.address import Address
from purveyor.model.errors import PurveyorError
from purveyor.model.json_fields import Json
from purveyor.pipeline.part_status import PartStatus
from purveyor.queues.status_board import post

EVERY_SECONDS: Final = 2.0
_END_SECONDS: Final = 2.0
Post = Callable[[str, Json], None]


class Posting:
    """The status of one pipeline. `show` is called with the newest; what is posted is the newest there is."""

    def __init__(self, find_address: Callable[[], Address], label: str, *, replicas: int = 1) -> None:
        self._find_address = find_address
        self._key = key_of(label)
        self._replicas = replicas
        self._newest: Json | None = None
        self._shown: tuple[object, ...] = ()
        self._wake = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="posting", daemon=True)

    def show(self, about: Mapping[str, Any], parts: Sequence[PartStatus]) -> None:
        """How the pipeline is. A change of a part's state is posted at once, the rest in its time."""
        self._newest = notice(about, parts)
        seen = tuple((part.state, part.error, part.restarts) for part in parts)
        if seen != self._shown:
            self._shown = seen
            self._wake.set()

    def _run(self) -> None:
        posted: Json | None = None
        while True:
            ended = self._over.is_set()
            newest = self._newest
            if newest is not None and newest is not posted:
                with contextlib.suppress(PurveyorError, OSError):
                    post(self._find_address(), self._key, newest, replicas=self._replicas)
                    posted = newest
            if ended:
                return
            self._wake.wait(EVERY_SECONDS)
            self._wake.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._newest is not None:
            self._newest = {**self._newest, "stopped": True}
        self._over.set()
        self._wake.set()
        self._thread.join(_END_SECONDS)


def key_of(label: str) -> str:
    """The key of a pipeline; the usual one has no label."""
    return f"pipeline.{label or 'all'}"


def notice(about: Mapping[str, Any], parts: Sequence[PartStatus]) -> Json:
    """What is posted: who runs it and where, and each part."""
    told = {key: value for key, value in about.items() if value is not None}
    where = {"pid": os.getpid(), "host": socket.gethostname()}
    return {**where, **told, "parts": [part.to_json() for part in parts]}
