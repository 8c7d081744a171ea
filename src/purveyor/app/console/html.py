"""HTML fragments of pages: head, navigation, tables, badges, alerts. This module escapes all outside text. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Final

from purveyor.app.console.alerts import Alert, Level
from purveyor.app.console.formatting import HINTS

_STATIC: Final = Path(__file__).parent / "static"
ICON: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" width="22" height="22">'
    '<path d="M3 6h7l4 6-4 6H3" fill="none" stroke="#4f7df0" stroke-width="2.4" stroke-linejoin="round"/>'
    '<path d="M12 6h3l6 6-6 6h-3" fill="none" stroke="#4f7df0" stroke-width="2.4" stroke-linejoin="round"/></svg>'
)
PAGES: Final = (
    ("/", "Overview", "g o"),
    ("/console/queues", "Queues", "g q"),
    ("/console/subscriptions", "Subscriptions", "g s"),
    ("/console/dead-letters", "Dead letters", "g d"),
    ("/console/pipeline", "Pipeline", "g p"),
)


@cache
def static(name: str) -> str:
    """Return the text of a static file."""
    return (_STATIC / name).read_text(encoding="utf-8")


def head() -> str:
    """Return the style and script of every page. Inline, so that the theme is set before the browser draws."""
    return f"<style>{static('console.css')}</style><script>{static('console.js')}</script>"


def top_bar(current: str, dead: int = 0) -> str:
    """Return the bar at the top."""
    links = "".join(
        f'<a href="{href}" title="{name} ({keys})"{" aria-current=page" if href == current else ""}>{name}'
        f"{f'<b>{dead}</b>' if dead and name == 'Dead letters' else ''}</a>"
        for href, name, keys in PAGES
    )
    return (
        '<a class="skip" href="#content">To the content</a>'
        f'<div><a class="brand" href="/">{ICON}Purveyor</a><nav aria-label="Pages">{links}</nav>'
        '<div class="tools"><button type="button" onclick="purveyor.turn()" title="Dark or light (t)">Theme</button>'
        '<form method="post" action="/console/logout"><button type="submit">Log out</button></form></div></div>'
    )


def page_head(title: str, text: str) -> str:
    """Return the title of a page with its one-line description."""
    return f'<div class="head"><h1 id="content" tabindex="-1">{escape(title)}</h1><p>{escape(text)}</p></div>'


_LEVELS: Final = {Level.FINE: "fine", Level.NOTE: "note", Level.WARNING: "warning", Level.STUCK: "stuck"}
_LEVEL_NAMES: Final = {Level.FINE: "fine", Level.NOTE: "in progress", Level.WARNING: "warning", Level.STUCK: "stuck"}
_ICONS: Final = {Level.FINE: "✓", Level.NOTE: "…", Level.WARNING: "!", Level.STUCK: "✕"}


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that is already HTML."""

    text: str


Cell = str | Markup | None


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table: its title, whether it holds numbers, and the definition of the title."""

    title: str
    numeric: bool = False
    hint: str = ""
    narrow: bool = True
    """Whether phones show it."""
    shape: str = ""
    """`tight`: no line breaks; `line`: one line in the remaining width, cut at its end."""


def cell(value: Cell) -> str:
    """Return the content of a cell."""
    if value is None:
        return "-"
    return value.text if isinstance(value, Markup) else escape(value)


def table(heads: Sequence[TableColumn], rows: Iterable[Sequence[Cell]], *, label: str) -> str:
    """Return a table. Phones show each row as a card, with the column title before each value."""
    head = "".join(
        f'<th scope="col"{_class(each)}>{with_hint(each.title, each.hint or HINTS.get(each.title.lower(), ""))}</th>'
        for each in heads
    )
    body = "".join(f"<tr>{''.join(map(_cell, heads, row))}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table class="data">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(head: TableColumn, value: Cell) -> str:
    return f'<td{_class(head)} data-title="{escape(head.title)}">{cell(value)}</td>'


def _class(head: TableColumn) -> str:
    names = [name for name, wanted in (("num", head.numeric), ("wide", not head.narrow), (head.shape, True)) if wanted]
    names = [name for name in names if name]
    return f' class="{" ".join(names)}"' if names else ""


def with_hint(text: str, hint: str) -> str:
    """Return a term with its definition as a tooltip."""
    return f'<span class="hint" title="{escape(hint)}">{escape(text)}</span>' if hint else escape(text)


def link(text: str, href: str) -> Markup:
    """Return a link."""
    return Markup(f'<a href="{escape(href)}">{escape(text)}</a>')


def badge(text: str, level: Level = Level.FINE) -> Markup:
    """Return a state as a badge. Colour and sign both show the level, for readers who do not see colours."""
    sign = f'<i aria-hidden="true">{_ICONS[level]}</i>'
    return Markup(f'<span class="badge {_LEVELS[level]}">{sign}{escape(text)}</span>')


def level_badge(level: Level) -> Markup:
    """Return a level as a badge."""
    return badge(_LEVEL_NAMES[level], level)


def empty(title: str, text: str) -> str:
    """Return the text of an empty section: why it is empty, and what would change it."""
    return f'<div class="empty"><strong>{escape(title)}</strong><span>{escape(text)}</span></div>'


def alerts(found: Sequence[Alert]) -> str:
    """Return the alerts as a list, or the message that there are none."""
    if not found:
        return (
            '<div class="all-clear" role="status"><i aria-hidden="true">✓</i>'
            "<div><strong>All is well</strong><span>Nothing is stuck. No action is needed.</span></div></div>"
        )
    items = "".join(
        f'<li class="alert {_LEVELS[each.level]}"><i aria-hidden="true">{_ICONS[each.level]}</i><div>'
        f"<strong>{escape(each.title)}</strong><span>{escape(each.reason)}.</span>"
        f"<em>Next: {escape(each.next)}.{_more(each)}</em></div></li>"
        for each in found
    )
    return f'<ul class="alerts" aria-label="Alerts">{items}</ul>'


def _more(alert: Alert) -> str:
    if not alert.link:
        return ""
    return f' <a href="{escape(alert.link)}" aria-label="Open: {escape(alert.title)}">Open</a>'


def pairs(rows: Iterable[tuple[str, Cell]]) -> str:
    """Return a list of names and values."""
    items = "".join(
        f"<div><dt>{with_hint(name, HINTS.get(name.lower(), ''))}</dt><dd>{cell(value)}</dd></div>"
        for name, value in rows
    )
    return f'<dl class="pairs">{items}</dl>'


def large_numbers(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return large numbers, each with a title and a remark."""
    items = "".join(
        f"<div><dt>{with_hint(name, HINTS.get(name.lower(), ''))}</dt><dd>{escape(value)}</dd>"
        f"<span>{escape(remark)}</span></div>"
        for name, value, remark in rows
    )
    return f'<dl class="numbers">{items}</dl>'


def progress(done: int, total: int | None) -> Markup:
    """Return a progress bar."""
    share = 0.0 if not total else min(done / total, 1.0)
    return Markup(
        f'<span class="progress" role="progressbar" aria-valuenow="{share * 100:.0f}" aria-valuemin="0" '
        f'aria-valuemax="100"><i style="width:{share * 100:.1f}%"></i></span>'
    )


def preformatted(text: str) -> str:
    """Return preformatted text."""
    return f'<pre class="body" tabindex="0">{escape(text)}</pre>'
