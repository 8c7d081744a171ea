"""Fixtures: the fault of a test, and the system that faults of one server share."""

from collections.abc import Iterator

import pytest

from tests.support.fault_guide import FaultCheck, faults_of
from tests.support.faulty_system import FaultySystem
from tests.support.push import site

__all__ = ["site"]


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Iterator[FaultCheck]:
    """Return the fault whose row in the guide names this test; afterwards all of its rows must have been compared."""
    (check,) = faults_of(request).values()
    yield check
    assert not check.unchecked, f"{check.fault.title}: not compared: {check.unchecked}"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultySystem]:
    """Start one deployment for the faults of single subscriptions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PURVEYOR_API_PORT", "0")
        with FaultySystem(tmp_path_factory.mktemp("troubles") / "data") as running:
            yield running
