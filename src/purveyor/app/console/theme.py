"""The look and the frame of every page: style, scripts, the brand, the navigation. Text only; pages add the life."""

from functools import cache
from html import escape
from pathlib import Path
from typing import Final

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
    """A file that goes into pages."""
    return (_STATIC / name).read_text(encoding="utf-8")


def head() -> str:
    """What stands in the head of every page. The theme is put on before anything is drawn: no flash of the other."""
    return f"<style>{static('console.css')}</style><script>{static('console.js')}</script>"


def top(current: str, dead: int = 0) -> str:
    """The bar at the top."""
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
    """The title of a page, and one line on what it is."""
    return f'<div class="head"><h1 id="content" tabindex="-1">{escape(title)}</h1><p>{escape(text)}</p></div>'
