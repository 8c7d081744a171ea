"""The mark of a key: what delivery keeps of the key of a message, to tell whether two messages are about one object.

A key may be as long as an event allows, and the delivery state of a subscription, which holds one for each message that
is out, has to fit into one value of the server. So a key that is not short is kept as a digest. A short one is its own
mark: an older version, which compares whole keys, finds it in a state that this version wrote. Pure.
"""

import base64
import hashlib
from typing import Final

LONGEST: Final = 64
"""Bytes of the longest key that is its own mark."""
LONGEST_MARK: Final = LONGEST + 2
"""Bytes of the longest mark in JSON, with its quotes."""
_DIGEST_BYTES: Final = 16
_PREFIX: Final = "#"


def mark(key: str) -> str:
    """The mark of a key. A mark is the mark of itself, so that states of all versions can be read in the same way.

    >>> mark("u-1"), mark("x" * 1000)
    ('u-1', '#ybK9T_SHhkwp-0H6s-gYfg')
    """
    plain = len(key) <= LONGEST and key.isprintable() and '"' not in key and "\\" not in key
    if plain and (key.isascii() or len(key.encode()) <= LONGEST):
        return key
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
    return _PREFIX + base64.urlsafe_b64encode(digest).decode().rstrip("=")
