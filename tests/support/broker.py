"""Synchronous calls to a server for tests of Spark: make streams, publish, delete, purge, read."""

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import outgoing, publish_many, read_range
from purveyor.jetstream.bulk.net.pool import request_api


def url(address: Address) -> str:
    """Return the URL for the option `servers`."""
    parts = urlsplit(address.urls[0])
    return f"nats://{address.user}:{address.password}@{parts.hostname}:{parts.port}"


class Broker:
    """One server."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.url = url(address)

    def ask(self, subject: str, **body: Any) -> dict[str, Any]:
        return request_api(self.address, subject, body or None)

    def make(self, stream: str, **config: Any) -> str:
        base = {"name": stream, "subjects": [stream, f"{stream}.>"], "allow_direct": True, "storage": "file"}
        self.ask(f"STREAM.CREATE.{stream}", **{**base, **config})
        return stream

    def update(self, stream: str, **changes: Any) -> None:
        config = self.ask(f"STREAM.INFO.{stream}")["config"]
        self.ask(f"STREAM.UPDATE.{stream}", **{**config, **changes})

    def drop(self, stream: str) -> None:
        self.ask(f"STREAM.DELETE.{stream}")

    def add(self, subject: str, messages: Iterable[Any]) -> None:
        """Publish payloads (str, bytes) or (subject, data, headers, id) tuples, in order."""
        rows = (each if isinstance(each, tuple) else (subject, _bytes(each), None, None) for each in messages)
        publish_many(self.address, outgoing(rows))

    def numbers(self, stream: str, first: int, last: int) -> None:
        """Publish payloads that contain the sequence they get."""
        self.add(stream, [str(number) for number in range(first, last + 1)])

    def delete(self, stream: str, *sequences: int) -> None:
        for sequence in sequences:
            self.ask(f"STREAM.MSG.DELETE.{stream}", seq=sequence, no_erase=True)

    def purge(self, stream: str, **how: Any) -> None:
        self.ask(f"STREAM.PURGE.{stream}", **how)

    def state(self, stream: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(f"STREAM.INFO.{stream}")["state"]
        return found

    def created(self, stream: str) -> str:
        return str(self.ask(f"STREAM.INFO.{stream}")["created"])

    def durable(self, stream: str, name: str, **config: Any) -> None:
        body = {"durable_name": name, "name": name, "ack_policy": "explicit", "deliver_policy": "all", **config}
        self.ask(f"CONSUMER.CREATE.{stream}.{name}", stream_name=stream, config=body, action="")

    def move(self, stream: str, durable: str, *, past: int) -> None:
        """Acknowledge all messages of a durable up to a sequence."""
        self.ask(f"CONSUMER.RESET.{stream}.{durable}", seq=past + 1)

    def floor(self, stream: str, durable: str) -> int:
        """Return the last sequence that the durable has acknowledged."""
        return int(self.ask(f"CONSUMER.INFO.{stream}.{durable}")["ack_floor"]["stream_seq"])

    def consumers(self, stream: str) -> list[str]:
        return sorted(self.ask(f"CONSUMER.NAMES.{stream}").get("consumers") or [])

    def rows(self, stream: str) -> list[dict[str, Any]]:
        """Return all messages of the stream."""
        last = self.state(stream)["last_seq"]
        return [row for batch in read_range(self.address, stream, 1, last) for row in batch.to_pylist()]

    def texts(self, stream: str) -> list[str]:
        return [row["data"].decode() for row in self.rows(stream)]

    def sequences(self, stream: str) -> list[int]:
        return [row["sequence"] for row in self.rows(stream)]


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def offset(value: Any) -> dict[str, Any]:
    """Parse an offset of a progress report."""
    found: dict[str, Any] = json.loads(value) if isinstance(value, str) else value
    return found
