"""Other supervising processes, which end with the test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.queues.server.processes import Supervisor


@pytest.fixture
def supervise() -> Iterator[Callable[..., Supervisor]]:
    """Start another process with an embedded server on a directory."""
    started: list[Supervisor] = []

    def start(directory: Path, *flags: str) -> Supervisor:
        started.append(Supervisor(directory, *flags))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.close()
