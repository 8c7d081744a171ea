"""The layout of the tests: shared helpers are in tests/support, and no test module imports another one."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the dotted names of modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_test_module(module: str) -> bool:
    """Whether a name is the one of a test module or of a conftest, such as `tests.stages.test_relay`."""
    parts = module.split(".")
    path = TESTS.parent.joinpath(*parts).with_suffix(".py")
    return parts[0] == "tests" and (parts[-1].startswith("test_") or parts[-1] == "conftest") and path.is_file()


def test_no_file_imports_a_test_module_or_a_conftest() -> None:
    found = {
        f"{path.relative_to(TESTS)} imports {module}"
        for path in TESTS.rglob("*.py")
        for module in imported_modules(path)
        if is_test_module(module)
    }
    assert not found, "move what they share to tests/support"
