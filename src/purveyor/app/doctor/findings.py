"""What the doctor finds: data, and the order of its weight."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Weight(Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    WARNING = "warning"
    """It works, and may not for long, or not safely."""
    WRONG = "wrong"
    """Something does not work, or will lose something."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what it is about, what was found, and what to do."""

    about: str
    weight: Weight
    text: str
    fix: str | None = None


def ok(about: str, text: str) -> Finding:
    """As it should be."""
    return Finding(about, Weight.OK, text)


def note(about: str, text: str, fix: str | None = None) -> Finding:
    """Worth knowing."""
    return Finding(about, Weight.NOTE, text, fix)


def warning(about: str, text: str, fix: str) -> Finding:
    """It may become a problem."""
    return Finding(about, Weight.WARNING, text, fix)


def wrong(about: str, text: str, fix: str) -> Finding:
    """It is a problem."""
    return Finding(about, Weight.WRONG, text, fix)


def is_wrong(findings: Iterable[Finding]) -> bool:
    """Whether something has to be done."""
    return any(finding.weight is Weight.WRONG for finding in findings)
