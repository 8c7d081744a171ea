"""Copy buttons: HTML that copies a text to the clipboard. `actions.js` does the copying. Pure."""

from html import escape

from purveyor.app.console.html import Cell, Markup, cell


def copy_button(text: str, what: str, label: str = "Copy") -> Markup:
    """Return a button that copies a text; `what` names it for screen readers: `the name`."""
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
