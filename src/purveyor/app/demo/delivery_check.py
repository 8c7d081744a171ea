"""What one subscriber of the demo got, and what is wrong with it: lost, twice, out of order. Pure."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from purveyor.app.demo.sample_directory import Step


@dataclass(slots=True)
class Stretch:
    """A time in which changes stream in; without an end as long as it lasts."""

    since: datetime
    calm: bool
    """Whether nothing else happens: no part is down or starting, and nobody is filled."""
    until: datetime | None = None

    def holds(self, moment: datetime) -> bool:
        """Whether something happened in it."""
        return self.since <= moment and (self.until is None or moment < self.until)


@dataclass(slots=True)
class Ledger:
    """Kept by a subscriber while it works."""

    name: str
    way: str
    """How it is served, for people."""
    by_key: bool = False
    """Whether order is promised for each object only; else for everything."""
    expected: int = 0
    got: int = 0
    again: int = 0
    """Deliveries beyond the first of a message: it had been refused."""
    doubled: int = 0
    disordered: int = 0
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By key, as the events told."""
    latencies: list[tuple[Stretch, float]] = field(default_factory=list)
    """Seconds from the source's record to this subscriber, of events that were stored in one of the `stretches`."""
    stretches: list[Stretch] = field(default_factory=list)
    newest: datetime | None = None
    """When the source had the newest record of which it got the event."""
    _began: float | None = None
    _ended: float = 0.0
    _last: dict[str, int] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    def take(self, event: Mapping[str, Any], position: int, now: datetime) -> None:
        """One message that was accepted. Positions of prefill are those of the events that made the objects."""
        self._ended = time.monotonic()
        self._began = self._began or self._ended
        self.got += 1
        self.doubled += position in self._seen
        self._seen.add(position)
        old, new = event["body"]["old"], event["body"]["new"]
        key = str((new or old).get("uuid") or (new or old)["dn"])
        line = key if self.by_key else ""
        self.disordered += position <= self._last.get(line, 0)
        self._last[line] = position
        if new:
            self.objects[key] = new
        else:
            self.objects.pop(key, None)
        stored = datetime.fromisoformat(event["ts"])
        self.newest = max(self.newest or stored, stored)
        stretch = next((each for each in self.stretches if each.holds(stored)), None)
        if stretch is not None:
            self.latencies.append((stretch, (now - stored).total_seconds()))

    @property
    def rate(self) -> float:
        """Messages per second between its first and its last."""
        seconds = self._ended - (self._began or 0.0)
        return (self.got - 1) / seconds if self.got > 1 and seconds > 0 else 0.0

    def latency(self, share: float, *, calm: bool = True) -> float | None:
        """A percentile, in seconds: of events that came while nothing else happened, or of all others."""
        found = sorted(seconds for stretch, seconds in self.latencies if stretch.calm is calm)
        return found[min(int(len(found) * share), len(found) - 1)] if found else None

    def problems(self, final: Step) -> Iterator[str]:
        """What does not hold, told against what the directory looks like in the end."""
        if self.got != self.expected:
            yield f"{self.name} got {self.got:,} messages instead of {self.expected:,}"
        if self.doubled or self.disordered:
            yield f"{self.name}: {self.doubled:,} doubled, {self.disordered:,} out of order"
        known = {key: (value.get("uid"), value["dn"]) for key, value in self.objects.items() if "uid=" in value["dn"]}
        if known != {person.uuid: (person.uid, person.dn) for person in final.people}:
            yield f"{self.name} knows other people than the directory has"
