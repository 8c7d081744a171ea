"""Check the shape and the words of the source: module size, base names, indirect English.

Rules:

1. A module of `src/` has at most 450 lines: a longer one holds a second idea.
2. At most three modules of `src/` have the same base name, so that a search by name finds the module. `__init__` is
   exempt.
3. Docstrings, comments, messages and the prose of the documents do not use the idioms of `INDIRECT`: they hide who does
   what, or how long.
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
FOLDERS = ("src", "scripts", "benchmarks", "examples")
DOCUMENTS = ("*.md", "docs/**/*.md")
MAX_MODULE_LINES = 450
MAX_SAME_BASE_NAME = 3
INDIRECT = re.compile(
    r"\b("
    r"nobody|somebody|anybody|everybody|whoever|whomever|"
    r"who (?:waits|asks|has|gets|comes|takes|looks|wants|reads|writes|sends)|"
    r"what (?:is|was) (?:told|said|asked for)|(?:is|are|was|were|be) told|"
    r"so (?:many|long|much) (?:at|it|may)|so often|as it lies|"
    r"(?:for|after|within) so long|so long that|"
    r"see the module|makes? it count|by (?:himself|itself|themselves)|as if it had not been|"
    r"unasked|anew|of before|(?<!as )of now|of today|all the same|once more|in vain|stands at|"
    r"tells? (?:what|whether|how|that|it|him|the|all)"
    r")\b",
    re.IGNORECASE,
)


def check(root: Path) -> list[str]:
    """Return one line for each violation below `root`, in the order of the files."""
    modules = sorted((root / "src").rglob("*.py"))
    problems = [*_long_modules(root, modules), *_repeated_names(root, modules)]
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if path != Path(__file__):
                problems += _indirect_words(root, path, _python_texts(path.read_text(encoding="utf-8")))
    for pattern in DOCUMENTS:
        for path in sorted(root.glob(pattern)):
            problems += _indirect_words(root, path, _paragraphs(path.read_text(encoding="utf-8")))
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


def _indirect_words(root: Path, path: Path, texts: Iterable[tuple[int, str]]) -> Iterator[str]:
    for line, words in sorted(texts):
        if found := INDIRECT.search(" ".join(words.split())):
            yield f"{path.relative_to(root)}:{line}: {found.group()!r}: name the actor and say what it does"


def _python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield each string, such as a docstring or a message, and each comment, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _paragraphs(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph, list or table with the number of its first line, without code."""
    text = re.sub(r"^```.*?^```", _blank_lines, markdown, flags=re.MULTILINE | re.DOTALL)
    for found in re.finditer(r"(?:.+\n?)+", text):
        yield text.count("\n", 0, found.start()) + 1, re.sub(r"`[^`]*`", "", found.group())


def _blank_lines(code: re.Match[str]) -> str:
    return "\n" * code.group().count("\n")


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
