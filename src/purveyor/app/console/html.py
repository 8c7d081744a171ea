"""HTML fragments of pages: head, navigation, tables, badges, alerts, copy buttons. Outside text is escaped. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Final

from purveyor.app.console.alert_groups import AlertGroup, group_alerts
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
    style, script = ("".join(static(f"{name}.{kind}") for name in ("console", "actions")) for kind in ("css", "js"))
    return f"<style>{style}</style><script>{script}</script>"


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
    """`tight`, `name`: no line breaks; `line`: one line in the remaining width, cut at its end; `prose`: sentences."""


def cell(value: Cell) -> str:
    """Return the content of a cell."""
    if value is None:
        return "-"
    return value.text if isinstance(value, Markup) else escape(value)


def table(heads: Sequence[TableColumn], rows: Iterable[Sequence[Cell]], *, label: str, stays: bool = False) -> str:
    """Return a table. Phones show each row as a card, with the column title before each value.

    `stays`: it is narrow enough to stay a table on phones.
    """
    head = "".join(
        f'<th scope="col"{_class(each)}>{with_hint(each.title, each.hint or HINTS.get(each.title.lower(), ""))}</th>'
        for each in heads
    )
    body = "".join(f"<tr>{''.join(map(_cell, heads, row))}</tr>" for row in rows)
    classes = "data stays" if stays else "data"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table class="{classes}">'
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
    """Return a link with a name. A long name ends with an ellipsis; its tooltip has all of it."""
    return Markup(f'<a class="cut" title="{escape(text)}" href="{escape(href)}">{escape(text)}</a>')


def cut(text: str | None, *, most: int = 28) -> Cell:
    """Return a name that is at most `most` characters wide. A longer one ends with an ellipsis, and is never broken."""
    if text is None:
        return None
    return Markup(f'<span class="cut" style="--cut:{most}ch" title="{escape(text)}">{escape(text)}</span>')


def names(found: Sequence[str], *, shown: int = 4) -> Markup:
    """Return names as a list; each stays on one line."""
    items = ", ".join(cell(cut(name, most=40)) for name in found[:shown])
    more = f' <span class="soft">and {len(found) - shown} more</span>' if len(found) > shown else ""
    return Markup(f'<span title="{escape(", ".join(found))}">{items}{more}</span>')


def badge(text: str, level: Level = Level.FINE) -> Markup:
    """Return a state as a badge. Colour and sign both show the level, for readers who do not see colours."""
    sign = f'<i aria-hidden="true">{_ICONS[level]}</i>'
    return Markup(f'<span class="badge {_LEVELS[level]}">{sign}{escape(text)}</span>')


def empty(title: str, text: str) -> str:
    """Return the text of an empty section: why it is empty, and what would change it."""
    return f'<div class="empty"><strong>{escape(title)}</strong><span>{escape(text)}</span></div>'


MAX_GROUPS: Final = 5
MAX_MEMBERS: Final = 12


def alerts(found: Iterable[Alert], *, expanded: bool = False) -> str:
    """Return alerts as lines that open, or one quiet line if there are none.

    The most urgent line is open if it is red. Notes, and what is beyond `MAX_GROUPS`, share the last line. `expanded`:
    all lines are open, on a page that is about one thing.
    """
    groups = group_alerts(found)
    if not groups:
        return f'<p class="all-clear" role="status"><i aria-hidden="true">{_ICONS[Level.FINE]}</i>All is well</p>'
    urgent = [group for group in groups if expanded or group.level > Level.NOTE][:MAX_GROUPS]
    rest = groups[len(urgent) :]
    lines = [
        _line_of(group).render(is_open=expanded or (number == 0 and group.level is Level.STUCK))
        for number, group in enumerate(urgent)
    ]
    if len(rest) == 1:
        lines.append(_line_of(rest[0]).render())
    elif rest:
        notes = all(group.level is Level.NOTE for group in rest)
        inner = "".join(_line_of(group).render() for group in rest)
        last = _AlertLine(
            key="rest",
            level=rest[0].level,
            title=f"{len(rest)} {'notes' if notes else 'more'}",
            short=" · ".join(group.title for group in rest),
            inner=f'<ul class="alerts">{inner}</ul>',
        )
        lines.append(last.render())
    return f'<ul class="alerts" aria-label="Alerts">{"".join(lines)}</ul>'


@dataclass(frozen=True, slots=True, kw_only=True)
class _AlertLine:
    """A line that opens. The script recognises a line by its key: it stays open when other lines come and go."""

    key: str
    level: Level
    title: str
    short: str
    inner: str

    def render(self, *, is_open: bool = False) -> str:
        """Return the HTML."""
        return (
            f'<li class="alert {_LEVELS[self.level]}" data-id="{escape(self.key)}">'
            f'<details{" open" if is_open else ""}><summary><i aria-hidden="true">{_ICONS[self.level]}</i>'
            f"<strong>{escape(self.title)}</strong><span>{escape(self.short)}</span></summary>"
            f"<div>{self.inner}</div></details></li>"
        )


def _line_of(group: AlertGroup) -> _AlertLine:
    first = group.alerts[0]
    if len(group.alerts) == 1:
        short, inner = first.reason, f"<p>{escape(first.reason)}.</p>{_next_step(first)}"
    else:
        short, inner = ", ".join(_name(each) for each in group.alerts[:MAX_MEMBERS]), _members(group.alerts)
    return _AlertLine(key=group.id, level=group.level, title=group.title, short=short, inner=inner)


def _members(found: Sequence[Alert]) -> str:
    """Return the alerts of a group; the next step once, if it is the same for all."""
    same_step = len({each.next for each in found}) == 1
    members = "".join(
        f"<li>{_link_of(each)}<span>{escape(each.reason)}.</span>"
        f"{'' if same_step else f'<em>Next: {escape(each.next)}.</em>'}</li>"
        for each in found[:MAX_MEMBERS]
    )
    left_out = len(found) - MAX_MEMBERS
    more = f"<li>and {left_out} more: see the pages of queues and subscriptions</li>" if left_out > 0 else ""
    step = f"<em>Next: {escape(found[0].next)}.</em>" if same_step else ""
    return f"{step}<ul>{members}{more}</ul>"


def _next_step(alert: Alert) -> str:
    where = f' <a href="{escape(alert.link)}" aria-label="Open: {escape(alert.title)}">Open</a>' if alert.link else ""
    return f"<em>Next: {escape(alert.next)}.{where}</em>"


def _name(alert: Alert) -> str:
    return alert.about.partition(":")[2] or alert.about


def _link_of(alert: Alert) -> str:
    """Return the name of what the alert is about, as a link; the title as its hint."""
    name = escape(_name(alert))
    hint = escape(alert.title)
    return f'<a href="{escape(alert.link)}" title="{hint}">{name}</a>' if alert.link else f"<b>{name}</b>"


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


def copy_button(text: str, what: str, label: str = "Copy") -> Markup:
    """Return a button that copies a text (`actions.js`); `what` names it for screen readers: `the name`."""
    return Markup(
        f'<button type="button" class="copy" data-copy="{escape(text)}" aria-label="Copy {escape(what)}" '
        f'title="Copy {escape(what)}">{escape(label)}</button>'
    )


def copyable(shown: Cell, text: str, what: str) -> Markup:
    """Return a value with its copy button."""
    return Markup(f'<span class="copyable">{cell(shown)}{copy_button(text, what).text}</span>')


def copyable_code(text: str, what: str) -> Markup:
    """Return a text in fixed width with its copy button."""
    return copyable(Markup(f"<code>{escape(text)}</code>"), text, what)
