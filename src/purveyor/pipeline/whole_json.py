"""A message is one JSON object and nothing behind it, for Spark as for the model.

Spark's parser stops where the object ends, and never looks at what comes after it. So the brace at the end of the text
is replaced by one more field, whose name is known to nobody else, and a brace. The field is found in the object only if
that was the brace which ends it.
"""

import secrets
from typing import Final

_MARK: Final = f"m{secrets.token_hex(8)}"
_END: Final = f',"{_MARK}":true}}'.encode().hex()
_BLANKS: Final = r"' \t\r\n'"


def read_json(text: str, fields: str, options: str = "map()") -> str:
    """A SQL expression that reads the fields out of a text, as a struct; without meaning unless it `is_whole`."""
    trimmed = f"trim(trailing {_BLANKS} from {text})"
    marked = " ".join(f"when endswith({each}, '}}') then {_with_mark(each)}" for each in (text, trimmed))
    return (
        f"from_json(cast(case {marked} end as string), '{fields}, {_MARK} boolean, _corrupt_record string', {options})"
    )


def _with_mark(text: str) -> str:
    """In bytes: to count characters takes longer than all else here."""
    return f"concat(substring(cast({text} as binary), 1, octet_length({text}) - 1), X'{_END}')"


def is_whole(read: str) -> str:
    """Whether the text was one JSON object with fields of these types, and nothing else. Null or false if not."""
    return f"({read}._corrupt_record is null and {read}.{_MARK})"
