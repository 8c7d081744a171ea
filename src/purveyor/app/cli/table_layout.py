"""The layout of a table: which columns are wrapped so that it fits a terminal, and its lines in a pipe. Pure."""

from collections.abc import Collection, Sequence
from typing import Final

from rich.cells import cell_len

GAP: Final = "  "
_SMALLEST_COLUMN: Final = 12
"""A wrapped column keeps this width, and its heading: narrower ones cannot be read."""
_WIDEST_PADDING: Final = 200
"""In a pipe, a longer cell does not move the columns behind it in the other rows."""

Cells = Sequence[Sequence[str]]
"""Rows of cells, the first one with the headings."""


def fit_widths(cells: Cells, available: int, wrap: Collection[str]) -> list[int] | None:
    """Return the widths of the columns in a terminal; None if the table does not fit even with wrapped columns.

    The columns in `wrap` shrink first, the widest of them first; then the other columns of text. Numbers are never
    wrapped.
    """
    natural = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    available -= len(GAP) * (len(natural) - 1)
    if sum(natural) <= available:
        return natural
    texts = [not _is_numeric(column[1:]) for column in zip(*cells, strict=True)]
    first = [is_text and heading in wrap for heading, is_text in zip(cells[0], texts, strict=True)]
    for shrinkable in (first, texts):
        least = [
            max(cell_len(heading), min(width, _SMALLEST_COLUMN)) if shrinks else width
            for heading, width, shrinks in zip(cells[0], natural, shrinkable, strict=True)
        ]
        if sum(least) <= available:
            return _shrink(natural, least, available)
    return None


def _shrink(natural: Sequence[int], least: Sequence[int], available: int) -> list[int]:
    """Limit the widths to the highest common cap with which they fit; no width is below its least."""
    low, high = 0, max(natural)
    while low < high:
        cap = (low + high + 1) // 2
        if sum(_capped(natural, least, cap)) <= available:
            low = cap
        else:
            high = cap - 1
    return _capped(natural, least, low)


def _capped(natural: Sequence[int], least: Sequence[int], cap: int) -> list[int]:
    return [min(width, max(cap, floor)) for width, floor in zip(natural, least, strict=True)]


def _is_numeric(cells: Sequence[str]) -> bool:
    return all(cell == "-" or cell.replace(".", "", 1).isdigit() for cell in cells)


def pipe_lines(cells: Cells) -> list[str]:
    """Return the lines of a table for a pipe: each row on one line, with nothing cut.

    >>> pipe_lines([("NAME", "N"), ("ox", "1")])
    ['NAME  N', 'ox    1']
    """
    widths = [
        max((length for length in map(cell_len, column) if length <= _WIDEST_PADDING), default=0)
        for column in zip(*cells, strict=True)
    ]
    return [
        GAP.join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def row_blocks(cells: Cells) -> str:
    """Return a table as a block of lines for each row, with the headings before the values.

    >>> print(row_blocks([("NAME", "N"), ("ox", "1")]))
    NAME: ox
       N: 1
    """
    headings, *rows = cells
    width = max(map(cell_len, headings))
    blocks = (
        [f"{' ' * (width - cell_len(head))}{head}: {cell}" for head, cell in zip(headings, row, strict=True)]
        for row in rows
    )
    return "\n\n".join("\n".join(lines) for lines in blocks)
