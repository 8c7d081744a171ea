"""The guide to troubleshooting as data: each fault with the texts that the guide quotes, to compare with a real system.

A fault is a heading with a table below it. In the cells, a text in backticks is a quote: `...` stands for any text, and
NAME for the subscription. A quote of the console or of `doctor` has its weight in front, and perhaps an age: "red after
6 minutes: `...`". A quote of the metrics is a comparison (`purveyor_nats_up = 0`) or the name of an alert.
"""

import operator
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy import alerting
from tests.support.waiting import wait_until

ROOT: Final = Path(__file__).parents[2]
GUIDE: Final = ROOT / "docs" / "guides" / "troubleshooting.md"
USERS, CONSOLE, DOCTOR, READYZ, LOG, METRICS = PLACES = ("users", "console", "doctor", "`/readyz`", "log", "metrics")
"""Where a fault shows: the first cells of the rows that hold quotes."""
DO, TEST = "do", "test"
NOTHING: Final = "nothing"
NOT_THERE: Final = "not there"
"""The console, for example, while the API does not run."""
AGES: Final = frozenset({"purveyor_queue_oldest_age_seconds", "purveyor_push_failing_seconds"})
_HEADING = re.compile(r"### (?P<title>.+)")
_ROW = re.compile(r"\| (?P<place>[^|]+?) \| (?P<cell>.+) \|$")
_QUOTE = re.compile(
    r"(?:(?P<weight>red|wrong|warning|note)(?: after (?P<age>\d+) (?P<unit>minutes|hours))?: )?"
    r"(?P<fence>`+) ?(?P<text>.+?) ?(?P=fence)"
)
_METRIC = re.compile(r"(?P<name>purveyor_\w+)(?:\{(?P<labels>.*)\})? (?P<sign>[=>]) (?P<value>[\d.]+)")
_ANY = re.compile(r"\s*\.\.\.\s*")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_SIGNS: Final[dict[str, Callable[[float, float], bool]]] = {"=": operator.eq, ">": operator.gt}


@dataclass(frozen=True)
class Quote:
    """A text that the guide quotes, its weight, and how old the fault is when it shows."""

    text: str
    weight: str | None = None
    minutes: float = 0.0

    def is_in(self, seen: Sequence[str], name: str) -> bool:
        parts = (re.escape(part.replace("NAME", name)) for part in _ANY.split(self.text))
        pattern = re.compile((f"{self.weight}: .*?" if self.weight else "") + ".*?".join(parts), re.DOTALL)
        return any(pattern.search(" ".join(text.split())) for text in seen)


@dataclass(frozen=True)
class Fault:
    """A fault of the guide."""

    title: str
    cells: dict[str, str] = field(default_factory=dict)

    @property
    def test(self) -> str:
        return self.cells[TEST].strip("`")

    def quotes(self, place: str) -> list[Quote]:
        found = []
        for match in _QUOTE.finditer(self.cells[place]):
            hours = match["unit"] == "hours"
            minutes = float(match["age"] or 0) * (60 if hours else 1)
            found.append(Quote(match["text"], match["weight"], minutes))
        return found


class System(Protocol):
    """A system with a fault. `minutes`: as it will be then if nothing changes."""

    def console(self, minutes: float) -> list[str]: ...

    def doctor(self, minutes: float) -> list[str]: ...

    def readyz(self) -> list[str]: ...

    def log(self, since: float) -> list[str]:
        """Return the lines since a time of `time.monotonic`."""

    def page(self) -> str: ...

    def is_background(self, text: str) -> bool:
        """Return whether a text is there without a fault."""


class FaultCheck:
    """Compares the quotes of one fault with a system, and notes which rows were compared."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._checked: set[str] = set()
        self._since = time.monotonic()

    @property
    def unchecked(self) -> set[str]:
        return set(self.fault.cells) - self._checked - {DO, TEST}

    def shows(
        self,
        system: System,
        name: str = "",
        *,
        users: Sequence[str] = (),
        log: Sequence[str] = (),
        before: str = "",
        places: Sequence[str] = PLACES,
    ) -> None:
        """Assert that everything the guide quotes can be seen. `before`: the metrics before the fault."""
        for place, cell in self.fault.cells.items():
            if place not in places:
                continue
            self._checked.add(place)
            quotes = self.fault.quotes(place)
            assert bool(quotes) != cell.startswith((NOTHING, NOT_THERE)), f"{self.fault.title}: {place} quotes nothing"
            if place == METRICS:
                for quote in quotes:
                    self._shows_metric(system, quote, name, before)
                continue
            if cell.startswith(NOTHING):
                self._shows_nothing(system, place)
            for quote in quotes:
                self._shows_text(system, place, quote, name, (*users, *log))

    def _shows_text(self, system: System, place: str, quote: Quote, name: str, given: Sequence[str]) -> None:
        assert (quote.weight is not None) == (place in (CONSOLE, DOCTOR)), f"{self.fault.title}: {quote}"
        last: list[str] = []

        def is_seen() -> bool:
            last[:] = self._look(system, place, quote.minutes, given)
            return quote.is_in(last, name)

        try:
            wait_until(is_seen)
        except AssertionError:
            seen = "\n".join(last)
            raise AssertionError(f"{self.fault.title}: {place} does not show {quote}; it shows:\n{seen}") from None

    def _shows_nothing(self, system: System, place: str) -> None:
        urgent = ("red: ", "wrong: ", "warning: ") if place in (CONSOLE, DOCTOR) else ("",)
        seen = [each for each in self._look(system, place, 0.0, ()) if each.startswith(urgent)]
        assert not [each for each in seen if not system.is_background(each)], f"{self.fault.title}: {place}"

    def _look(self, system: System, place: str, minutes: float, given: Sequence[str]) -> list[str]:
        if place == CONSOLE:
            return system.console(minutes)
        if place == DOCTOR:
            return system.doctor(minutes)
        if place == READYZ:
            return system.readyz()
        return [*given, *system.log(self._since)] if place == LOG else list(given)

    def _shows_metric(self, system: System, quote: Quote, name: str, before: str) -> None:
        text = quote.text.replace("NAME", name)
        last: list[str] = []

        def is_seen() -> bool:
            last[:] = [system.page()]
            if (found := _METRIC.fullmatch(text)) is not None:
                return _holds(last[0], found)
            pages = [before, last[0]] if before else last
            return text in alerting.fired(pages, growing=AGES) | alerting.fired(
                [pages[0], *pages[-1:] * 120], growing=AGES, minutes=120
            )

        try:
            wait_until(is_seen)
        except AssertionError:
            lines = [line for line in last[0].splitlines() if line.startswith("purveyor_")]
            seen = "\n".join(lines) if text.startswith("purveyor_") else alerting.fired(last, growing=AGES)
            raise AssertionError(f"{self.fault.title}: not in the metrics: {text}; they are:\n{seen}") from None


def _holds(page: str, wanted: re.Match[str]) -> bool:
    labels = set(_LABEL.findall(wanted["labels"] or ""))
    values = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == wanted["name"] and labels <= set(sample.labels.items())
    ]
    return any(_SIGNS[wanted["sign"]](value, float(wanted["value"])) for value in values)


def read_faults() -> list[Fault]:
    """Read the faults of the guide."""
    faults: list[Fault] = []
    for line in GUIDE.read_text(encoding="utf-8").splitlines():
        if (heading := _HEADING.fullmatch(line)) is not None:
            faults.append(Fault(heading["title"]))
        elif faults and (row := _ROW.fullmatch(line)) is not None and set(row["place"]) != {"-"}:
            if row["place"].strip():
                faults[-1].cells[row["place"]] = row["cell"].strip()
        elif line.startswith("## "):
            faults.append(Fault(""))  # its tables are no faults
    return [fault for fault in faults if fault.title]


def faults_of(request: pytest.FixtureRequest) -> dict[str, FaultCheck]:
    """Return the faults whose rows name the test that runs, by title."""
    name = f"{request.node.path.relative_to(ROOT)}::{request.node.originalname}"
    return {fault.title: FaultCheck(fault) for fault in read_faults() if fault.test == name}
