"""Check the shape and the words of the source: module size, base names, indirect English.

Rules, for `src/` (the words also for `scripts/` and `benchmarks/`):

1. A module has at most 450 lines: a longer one holds a second idea.
2. At most three modules have the same base name, so that a search by name finds the module. `__init__` is exempt.
3. Docstrings and comments do not use the idioms of `INDIRECT`: they hide who does what.
"""

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_MODULE_LINES = 450
MAX_SAME_BASE_NAME = 3
INDIRECT = re.compile(
    r"\b("
    r"nobody|somebody|whoever|whomever|"
    r"who (?:waits|asks|has|gets|comes|takes|looks|wants|reads|writes|sends)|"
    r"what (?:is|was) (?:told|said|asked for)|(?:is|are|was|were|be) told|"
    r"so (?:many|long|much) (?:at|it|may)|so often|as it lies|"
    r"see the module|makes? it count|by himself|as if it had not been"
    r")\b",
    re.IGNORECASE,
)


def check(root: Path) -> list[str]:
    """Return one line for each violation below `root`, in the order of the files."""
    modules = sorted((root / "src").rglob("*.py"))
    problems = [*_long_modules(root, modules), *_repeated_names(root, modules)]
    for folder in ("src", "scripts", "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            if path != Path(__file__):
                problems += _indirect_words(root, path)
    return problems


def _long_modules(root: Path, modules: Iterable[Path]) -> Iterator[str]:
    for path in modules:
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > MAX_MODULE_LINES:
            yield f"{path.relative_to(root)}: {lines} lines, at most {MAX_MODULE_LINES}: split it by idea"


def _repeated_names(root: Path, modules: Iterable[Path]) -> Iterator[str]:
    by_name: dict[str, list[str]] = defaultdict(list)
    for path in modules:
        if path.stem != "__init__":
            by_name[path.stem].append(str(path.relative_to(root)))
    for name, places in by_name.items():
        if len(places) > MAX_SAME_BASE_NAME:
            yield f"{len(places)} modules are called {name}.py, at most {MAX_SAME_BASE_NAME}: {', '.join(places)}"


def _indirect_words(root: Path, path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    for line, words in sorted([*_docstrings(text), *_comments(text)]):
        if found := INDIRECT.search(" ".join(words.split())):
            yield f"{path.relative_to(root)}:{line}: {found.group()!r}: name the actor and say what it does"


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield each string that stands as a statement: docstrings, also those of attributes and constants."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def _comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def main() -> int:
    """Print the violations and return the exit code: 0 when there are none."""
    problems = check(ROOT)
    for problem in problems:
        print(problem)
    if problems:
        print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
