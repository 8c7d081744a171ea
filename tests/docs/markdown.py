"""Parse guides: code blocks, the commands in them, and the comparison of outputs. Pure."""

import re
from dataclasses import dataclass

_FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[\w-]*)\s*$")
_ANY = "..."
_TIMES = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+)?(?: ?UTC|Z|\+00:00)?")
_TIME_PATTERN = _TIMES.pattern


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its lines, and its first line number."""

    language: str
    lines: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Step:
    """A command of a console block with its expected output."""

    command: str
    expected: tuple[str, ...]
    line: int

    @property
    def in_background(self) -> bool:
        return self.command.rstrip().endswith("&")


def blocks(text: str) -> list[Block]:
    """Return all fenced blocks of a guide, in order."""
    found: list[Block] = []
    fence, language, start = "", "", 0
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _FENCE.match(line)
        if fence and line.strip() == fence:
            found.append(Block(language, tuple(inside), start))
            fence = ""
        elif fence:
            inside.append(line)
        elif match:
            fence, language, start, inside = match["fence"], match["language"], number, []
    if fence:
        raise ValueError(f"line {start}: the block is not closed")
    return found


def steps(block: Block) -> list[Step]:
    """Return the commands of a console block: `$ ` begins one, `> ` continues it, the rest is its output."""
    found: list[Step] = []
    for number, line in enumerate(block.lines, block.line + 1):
        if line.startswith("$ "):
            found.append(Step(line[2:], (), number))
        elif not found:
            raise ValueError(f"line {number}: output before the first command")
        elif line.startswith("> ") and not found[-1].expected:
            found[-1] = Step(f"{found[-1].command}\n{line[2:]}", (), found[-1].line)
        else:
            found[-1] = Step(found[-1].command, (*found[-1].expected, line), found[-1].line)
    return found


def matches(expected: tuple[str, ...], actual: str) -> bool:
    """Return whether an output is as expected.

    A line `...` stands for any lines, `...` inside a line for any text, and a time for any time. Empty lines at the end
    do not count.
    """
    pattern = "".join(_line_pattern(line) for line in _trimmed(list(expected)))
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _trimmed(actual.splitlines()))) is not None


def _line_pattern(line: str) -> str:
    if line.strip() == _ANY:
        return r"(?:[^\n]*\n)*?"
    parts = (
        _TIME_PATTERN.join(re.escape(piece) for piece in _TIMES.sub("\0", part).split("\0"))
        for part in line.rstrip().split(_ANY)
    )
    return r"[^\n]*?".join(parts) + "\n"


def _trimmed(lines: list[str]) -> list[str]:
    kept = [line.rstrip() for line in lines]
    while kept and not kept[-1]:
        kept.pop()
    return kept
