"""Pieces of pages as text: tables, badges, empty states. Everything that comes from outside is escaped here. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from purveyor.app.console.alerts import Level, Trouble
from purveyor.app.console.formatting import HINTS

_LEVELS: Final = {Level.FINE: "fine", Level.NOTE: "note", Level.WARNING: "warning", Level.STUCK: "stuck"}
_WORDS: Final = {Level.FINE: "fine", Level.NOTE: "under way", Level.WARNING: "look", Level.STUCK: "stuck"}
_ICONS: Final = {Level.FINE: "✓", Level.NOTE: "…", Level.WARNING: "!", Level.STUCK: "✕"}


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that is HTML already."""

    text: str


Cell = str | Markup | None


@dataclass(frozen=True, slots=True)
class Head:
    """A column: its title, whether it holds numbers, and what the title means."""

    title: str
    numeric: bool = False
    hint: str = ""
    narrow: bool = True
    """Whether it is shown on a phone."""
    shape: str = ""
    """`tight`: never broken into lines; `line`: one line that takes what room is left, and is cut."""


def cell(value: Cell) -> str:
    """A cell's inside."""
    if value is None:
        return "-"
    return value.text if isinstance(value, Markup) else escape(value)


def table(heads: Sequence[Head], rows: Iterable[Sequence[Cell]], *, label: str) -> str:
    """A table. On a phone each row is a card, with the title of the column before its value."""
    head = "".join(
        f'<th scope="col"{_class(each)}>{hinted(each.title, each.hint or HINTS.get(each.title.lower(), ""))}</th>'
        for each in heads
    )
    body = "".join(f"<tr>{''.join(map(_cell, heads, row))}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table class="facts">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(head: Head, value: Cell) -> str:
    return f'<td{_class(head)} data-title="{escape(head.title)}">{cell(value)}</td>'


def _class(head: Head) -> str:
    names = [name for name, wanted in (("num", head.numeric), ("wide", not head.narrow), (head.shape, True)) if wanted]
    names = [name for name in names if name]
    return f' class="{" ".join(names)}"' if names else ""


def hinted(text: str, hint: str) -> str:
    """A word with what it means."""
    return f'<span class="hint" title="{escape(hint)}">{escape(text)}</span>' if hint else escape(text)


def link(text: str, href: str) -> Markup:
    """A link."""
    return Markup(f'<a href="{escape(href)}">{escape(text)}</a>')


def badge(text: str, level: Level = Level.FINE) -> Markup:
    """A word about a state: by its colour, and by its sign for those who do not see colours."""
    sign = f'<i aria-hidden="true">{_ICONS[level]}</i>'
    return Markup(f'<span class="badge {_LEVELS[level]}">{sign}{escape(text)}</span>')


def level_badge(level: Level) -> Markup:
    """The word for a level."""
    return badge(_WORDS[level], level)


def empty(title: str, text: str) -> str:
    """Nothing is there, which is a state too: why, and what would change it."""
    return f'<div class="empty"><strong>{escape(title)}</strong><span>{escape(text)}</span></div>'


def troubles(found: Sequence[Trouble]) -> str:
    """What somebody should know, the worst first."""
    if not found:
        return (
            '<div class="calm" role="status"><i aria-hidden="true">✓</i>'
            "<div><strong>All is well</strong><span>Nothing is stuck, and nobody has to act.</span></div></div>"
        )
    items = "".join(
        f'<li class="trouble {_LEVELS[each.level]}"><i aria-hidden="true">{_ICONS[each.level]}</i><div>'
        f"<strong>{escape(each.title)}</strong><span>{escape(each.reason)}.</span>"
        f"<em>Next: {escape(each.next)}.{_more(each)}</em></div></li>"
        for each in found
    )
    return f'<ul class="troubles" aria-label="What needs somebody">{items}</ul>'


def _more(trouble: Trouble) -> str:
    if not trouble.link:
        return ""
    return f' <a href="{escape(trouble.link)}" aria-label="Open: {escape(trouble.title)}">Open</a>'


def pairs(rows: Iterable[tuple[str, Cell]]) -> str:
    """Names and values."""
    told = "".join(
        f"<div><dt>{hinted(name, HINTS.get(name.lower(), ''))}</dt><dd>{cell(value)}</dd></div>" for name, value in rows
    )
    return f'<dl class="pairs">{told}</dl>'


def figures(rows: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers: a title, a value, and a remark."""
    told = "".join(
        f"<div><dt>{hinted(name, HINTS.get(name.lower(), ''))}</dt><dd>{escape(value)}</dd>"
        f"<span>{escape(remark)}</span></div>"
        for name, value, remark in rows
    )
    return f'<dl class="figures">{told}</dl>'


def progress(done: int, total: int | None) -> Markup:
    """How far something is."""
    share = 0.0 if not total else min(done / total, 1.0)
    return Markup(
        f'<span class="progress" role="progressbar" aria-valuenow="{share * 100:.0f}" aria-valuemin="0" '
        f'aria-valuemax="100"><i style="width:{share * 100:.1f}%"></i></span>'
    )


def preformatted(text: str) -> str:
    """Text as it is."""
    return f'<pre class="body" tabindex="0">{escape(text)}</pre>'
