"""Other supervising processes, which end with the test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jetstream.server.processes import Supervisor
from tests.support.small_disk import SmallDisk, small_file_system


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of 60 MB."""
    with small_file_system(tmp_path / "disk", "60m") as disk:
        yield disk
