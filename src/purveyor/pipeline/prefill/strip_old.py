"""The body of a prefill message: the event that last touched an object, without what the object was before. Pure.

Only `old` is cut out of the text; every other byte stays. Spark's own JSON functions parse and print, which rounds
long numbers and knows no way to keep a part of a text as it was: so this is done where the rows are written.
"""

import json
from typing import Final

from purveyor.model.errors import InvalidInput

_SPACE: Final = " \t\n\r"
_DECODER: Final = json.JSONDecoder()


def without_old(data: bytes) -> bytes:
    """The event with an empty `body.old`; InvalidInput if it is none.

    >>> without_old(b'{"topic": "a", "body": {"old": {"n": 1}, "new": {"n": 1.10}}}')
    b'{"topic": "a", "body": {"old": {}, "new": {"n": 1.10}}}'
    """
    try:
        text = data.decode()
        body = _member(text, _after_space(text, 0), "body")
        old = _member(text, body[0], "old") if body else None
    except (ValueError, IndexError, StopIteration) as error:
        raise InvalidInput(
            f"an archived event is no JSON object: {error}", fix="who else writes the archive?"
        ) from error
    if old is None:
        return data
    return f"{text[: old[0]]}{{}}{text[old[1] :]}".encode()


def _member(text: str, at: int, name: str) -> tuple[int, int] | None:
    """Where the value of a member of the object at that place begins and ends; of several the last, as parsers do."""
    found = None
    if text[at] != "{":
        raise ValueError(f"expected an object at character {at}")
    at = _after_space(text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _after_space(text, _after_space(text, at) + 1)
        _, end = _DECODER.raw_decode(text, begin)
        if key == name:
            found = (begin, end)
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return found


def _after_space(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at
