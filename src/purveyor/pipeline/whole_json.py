"""A message is one JSON object and nothing behind it, for Spark as for the model.

Spark's parser stops where the object ends, and never looks at what comes after it. So the text is read between two
marks: as the first element of a list whose second element is known to nobody else. Whatever stands behind the object,
the list has then not exactly these two elements, or is no JSON at all.
"""

import secrets
from typing import Final

_MARK: Final = f"m{secrets.token_hex(8)}"


def read_json(text: str, fields: str, options: str = "map()") -> str:
    """A SQL expression that reads the fields out of a text; see `given` and `is_whole`."""
    schema = f"{_MARK} array<struct<{_nested(fields)}, {_MARK}: boolean>>, _corrupt_record string"
    marked = f"""concat('{{"{_MARK}":[', {text}, ',{{"{_MARK}":true}}]}}')"""
    return f"from_json({marked}, '{schema}', {options})"


def given(read: str) -> str:
    """What was read, as a struct of the fields; without meaning unless it is whole."""
    return f"get({read}.{_MARK}, 0)"


def is_whole(read: str) -> str:
    """Whether the text was one JSON object with fields of these types, and nothing else. Null for no text."""
    marks = f"{read}.{_MARK}"
    return f"({read}._corrupt_record is null and size({marks}) = 2 and get({marks}, 1).{_MARK} <=> true)"


def _nested(fields: str) -> str:
    """`a string, b map<string,string>` as it is written within a struct."""
    depth, parts, begin = 0, [], 0
    for at, letter in enumerate(fields):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append(fields[begin:at].strip())
            begin = at + 1
    return ", ".join(part.replace(" ", ": ", 1) for part in [*parts, fields[begin:].strip()])
