"""The examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import purveyor

MODULES = [module.name for module in pkgutil.walk_packages(purveyor.__path__, "purveyor.")]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) > 5
