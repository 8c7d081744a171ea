"""Which subjects to read: what the server can be asked for, and what is left to be sorted out here."""

import re
from typing import Any

import pyarrow.compute as pc

from purveyor.model.name_rules import subject_matches


def without_covered(subjects: tuple[str, ...]) -> tuple[str, ...]:
    """Patterns without those that another one covers (the server refuses such a pair).

    >>> without_covered(("orders.>", "orders.new", "bills"))
    ('orders.>', 'bills')
    """
    distinct = tuple(dict.fromkeys(subjects))
    kept = tuple(one for one in distinct if not any(one != other and covers(other, one) for other in distinct))
    return () if ">" in kept else kept


def covers(wide: str, narrow: str) -> bool:
    """Whether each subject under `narrow` is also under `wide`.

    A wildcard counts as a token like any other, except that `*` does not take in a `>`.
    """
    if narrow.endswith(">") and not wide.endswith(">"):
        return False
    return subject_matches(wide, narrow)


def regex(subjects: tuple[str, ...]) -> str:
    """A pattern that matches the whole of a subject that any of them takes."""
    return "^(?:" + "|".join(map(_regex, subjects)) + ")$"


def keep(batch: Any, subjects: tuple[str, ...]) -> Any:
    """The rows of a batch that any of the patterns takes."""
    column = batch.column(batch.schema.get_field_index("subject"))
    return batch.filter(pc.match_substring_regex(column, regex(subjects)))


def _regex(subject: str) -> str:
    tokens = [r"[^.]+" if token == "*" else re.escape(token) for token in subject.split(".")]
    if tokens[-1] == re.escape(">"):
        tokens[-1] = ".+"
    return r"\.".join(tokens)
