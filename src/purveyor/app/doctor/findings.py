"""The findings of `purveyor doctor`, shared by all checks."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Weight(Enum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """Information; no action is needed."""
    WARNING = "warning"
    """It works, but may fail later or is not safe."""
    WRONG = "wrong"
    """Something does not work, or data will be lost."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its subject, its severity, a text, and a fix."""

    about: str
    weight: Weight
    text: str
    fix: str | None = None


def ok(about: str, text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(about, Weight.OK, text)


def note(about: str, text: str, fix: str | None = None) -> Finding:
    """Return an informational finding."""
    return Finding(about, Weight.NOTE, text, fix)


def warning(about: str, text: str, fix: str) -> Finding:
    """Return a warning."""
    return Finding(about, Weight.WARNING, text, fix)


def wrong(about: str, text: str, fix: str) -> Finding:
    """Return a problem."""
    return Finding(about, Weight.WRONG, text, fix)


def is_wrong(findings: Iterable[Finding]) -> bool:
    """Return whether a finding is a problem."""
    return any(finding.weight is Weight.WRONG for finding in findings)
