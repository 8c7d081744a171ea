"""Streams made for a measurement and removed after it."""

from typing import Any
from uuid import uuid4

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.pool import request_api


class Streams:
    """Fresh streams on one server."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._made: list[str] = []

    def fresh(self, **config: Any) -> str:
        """A new stream, its only subject its name."""
        name = f"bench-{uuid4().hex[:8]}"
        settings = {"name": name, "subjects": [name], "storage": "file", "allow_direct": True, **config}
        request_api(self._address, f"STREAM.CREATE.{name}", settings)
        self._made.append(name)
        return name

    def remove(self, name: str) -> None:
        """Remove one, to give its disk back."""
        request_api(self._address, f"STREAM.DELETE.{name}")
        self._made.remove(name)

    def clear(self) -> None:
        """Remove all."""
        for name in list(self._made):
            self.remove(name)
