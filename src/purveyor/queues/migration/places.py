"""Where migrations keep what they share: the keys of the bucket `migrations`."""

from typing import Final

BUCKET: Final = "migrations"
STREAM: Final = f"KV_{BUCKET}"
"""The stream behind the bucket."""


def record_key(queue: str) -> str:
    """The record of a queue's migration."""
    return f"record.{queue}"


def lease_key(queue: str) -> str:
    """Who works on it."""
    return f"lease.{queue}"


def deletion_key(stream: str) -> str:
    """Writing here deletes the stream. A whole token, because the server carries it over as one."""
    return f"delete.{stream}"


def position_key(queue: str, durable: str) -> str:
    """How far a reader by position is in the sealed stream."""
    return f"position.{queue}.{durable}"


def subject(key: str) -> str:
    """The subject of a key."""
    return f"$KV.{BUCKET}.{key}"
