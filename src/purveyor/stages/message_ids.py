"""The ids of messages and events that stages send. Pure; apart from `flow`, because the types of handlers need them."""

import hashlib
from uuid import uuid4


def derived_id(origin: str, cause: str, index: int) -> str:
    """Return the id of the nth message that a message causes at a stage: the same each time it is processed."""
    text = "\0".join((origin, cause, str(index)))
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def new_id() -> str:
    """Return the id of a message that no other message caused."""
    return uuid4().hex
