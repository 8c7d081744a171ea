"""The guide to troubleshooting: each fault names the test that causes it, and says what each place shows."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.support.fault_guide import CONSOLE, DO, DOCTOR, LOG, METRICS, PLACES, ROOT, TEST, Fault, read_faults

HERE = Path(__file__).parent


def functions(path: Path) -> set[str]:
    """Return the names of the tests in a file."""
    found = ast.parse(path.read_text()).body
    return {each.name for each in found if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")}


@pytest.mark.parametrize("fault", [pytest.param(each, id=each.title) for each in read_faults()])
def test_a_fault_says_what_each_place_shows_and_names_its_test(fault: Fault) -> None:
    assert {CONSOLE, DOCTOR, LOG, METRICS, DO, TEST} <= set(fault.cells) <= {*PLACES, DO, TEST}
    file, _, test = fault.test.partition("::")
    assert test in functions(ROOT / file)
    for place in (CONSOLE, DOCTOR):
        quotes = fault.quotes(place)
        assert all(quote.weight for quote in quotes), f"{place}: each quote has its weight in front"


def test_there_are_at_least_twenty_faults_and_each_test_of_a_fault_has_a_row() -> None:
    faults = read_faults()
    assert len(faults) >= 20
    assert max(Counter(fault.title for fault in faults).values()) == 1
    tests = {f"{path.relative_to(ROOT)}::{name}" for path in HERE.glob("test_*_faults.py") for name in functions(path)}
    assert {fault.test for fault in faults} == tests
