"""A comparison and how it is shown: a table on the terminal, and RESULTS.md."""

import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"


@dataclass(frozen=True, slots=True)
class Row:
    """Ours beside a peer. `at_least` or `at_most` is the ratio to reach; without either, the row is only reported."""

    name: str
    ours: float
    peer: float
    unit: str = "msg/s"
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        """Ours by the peer's."""
        return self.ours / self.peer if self.peer else float("nan")

    @property
    def aim(self) -> str:
        """What was to be reached, in words."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return f"<= {self.at_most:g}" if self.at_most is not None else ""

    @property
    def verdict(self) -> str:
        """Whether it was."""
        if self.at_least is not None:
            return "reached" if self.ratio >= self.at_least else "NOT REACHED"
        if self.at_most is not None:
            return "reached" if self.ratio <= self.at_most else "NOT REACHED"
        return ""


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of one benchmark with the words before them."""

    title: str
    words: str
    rows: Sequence[Row]


def table(section: Section) -> str:
    """As Markdown."""
    lines = [
        f"## {section.title}\n",
        f"{section.words}\n",
        "| what | ours | peer | unit | ratio | aim | |",
        "|---|---:|---:|---|---:|---|---|",
    ]
    for row in section.rows:
        reported = f"{row.verdict}{'; ' if row.verdict and row.note else ''}{row.note}"
        cells = (row.name, number(row.ours), number(row.peer), row.unit, f"{row.ratio:.2f}", row.aim, reported)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def best_of(rounds: int, ways: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The best rate of each way, of several rounds in which all take turns: a machine is never quiet."""
    best = dict.fromkeys(ways, 0.0)
    for count in range(rounds):
        for name, way in ways.items():
            best[name] = max(best[name], way())
            print(f"round {count + 1} of {rounds}, {name}: best so far {best[name]:,.0f}/s", flush=True)
    return best


def number(value: float) -> str:
    """Readable at a glance."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def record(sections: Sequence[Section]) -> None:
    """Replace these sections in RESULTS.md, each with its date; leave the others as they were."""
    kept = _sections(RESULTS.read_text()) if RESULTS.is_file() else {}
    for section in sections:
        kept[section.title] = f"{table(section)}\n_{datetime.now(UTC):%Y-%m-%d}, {machine()}_\n"
    head = (
        "# Results of the last run\n\nWritten by `make bench`. Ratios are measured side by side in one run; absolute "
        "figures are of the machine named and mean little elsewhere.\n"
    )
    RESULTS.write_text(head + "".join(f"\n{text}" for text in kept.values()))


def _sections(text: str) -> dict[str, str]:
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("## "): part.rstrip() + "\n" for part in parts}


def machine() -> str:
    """What it ran on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {system}"


def machine_load() -> str:
    """Return how busy the machine is with everything that runs on it."""
    ready, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"busy with other programs (load {ready:.0f} on {cores} cores)" if ready > 2 * cores else "quiet"
