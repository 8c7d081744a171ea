"""Text from elsewhere, made harmless for a terminal. Apart, because errors need it before anything else is imported."""


def safe(text: str) -> str:
    r"""What is not printable is escaped, so that it cannot move the cursor, hide or pretend.

    >>> safe("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape", "surrogatepass").decode() for ch in text)
