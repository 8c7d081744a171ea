"""Why a query ended, in one line of ours. An error of Python reaches the driver as text in an exception of the JVM.

Spark wraps what a source, a sink or a batch function raised into exceptions of its own, with the trace as their text.
The last line of that trace names our error by its type and says what happened; the type decides whether to try again.
"""

import re
from dataclasses import dataclass

from purveyor.model.errors import DataLost, InvalidInput, MigrationNeeded, PurveyorError, SetupError

_PERMANENT = (InvalidInput, MigrationNeeded, DataLost, SetupError)
_ABOUT_THE_QUERY = "\n=== Streaming Query ==="
_OURS = re.compile(r"^(?:\w+\.)*?purveyor(?:\.\w+)*\.(?P<kind>[A-Z]\w*): (?P<message>.+)$", re.MULTILINE)
_PYTHON = re.compile(r"^(?P<kind>(?:\w+\.)*[A-Z]\w*(?:Error|Exception)): (?P<message>.+)$", re.MULTILINE)
_TRACE = "Traceback (most recent call last)"
_BRIDGE = re.compile(r"^An error occurred while calling \S+\n: ")
"""What Spark's bridge to Java puts before an error that it does not know."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, and whether another attempt can go better."""

    message: str
    permanent: bool = False
    fix: str | None = None

    def __str__(self) -> str:
        return f"{self.message} ({self.fix})" if self.fix else self.message


def explain(error: BaseException) -> Failure:
    """The failure behind an error, whoever wrapped it."""
    if isinstance(error, PurveyorError):
        return Failure(_line(error.message), _is_permanent(type(error)), error.fix)
    text = _BRIDGE.sub("", str(error).partition(_ABOUT_THE_QUERY)[0].strip())
    ours = list(_OURS.finditer(text))
    if ours:
        return Failure(_line(ours[-1]["message"]), _is_permanent(_kind(ours[-1]["kind"])))
    python = list(_PYTHON.finditer(text)) if _TRACE in text else []
    if python:
        return Failure(_line(f"{python[-1]['kind'].rpartition('.')[2]}: {python[-1]['message']}"))
    return Failure(_line(text) or type(error).__name__)


def kind_of(text: str) -> type[PurveyorError] | None:
    """The type of our error that a text of Spark tells of; None if it tells of none."""
    ours = list(_OURS.finditer(text))
    return _kind(ours[-1]["kind"]) if ours else None


def python_kind(text: str) -> str | None:
    """The name of the exception of Python that a text of Spark tells of, without its module."""
    python = list(_PYTHON.finditer(text)) if _TRACE in text else []
    return str(python[-1]["kind"].rpartition(".")[2]) if python else None


def _is_permanent(kind: type[PurveyorError]) -> bool:
    """Whether another attempt is of no use. What a query stands on is gone for good; a plan is made again each time."""
    return issubclass(kind, _PERMANENT) and not kind.retryable


def _line(text: str) -> str:
    stripped = text.strip()
    return stripped.splitlines()[0].strip() if stripped else ""


def _kind(name: str) -> type[PurveyorError]:
    """The error of that name; of one that this process has not heard of nothing more is known."""
    waiting: list[type[PurveyorError]] = [PurveyorError]
    while waiting:
        kind = waiting.pop()
        if kind.__name__ == name:
            return kind
        waiting.extend(kind.__subclasses__())
    return PurveyorError
