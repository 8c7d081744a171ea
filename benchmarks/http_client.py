"""A minimal HTTP client: benchmarks measure the server, and both share the machine."""

import asyncio
from collections.abc import Mapping


class HttpConnection:
    """One persistent connection, for servers that send Content-Length with every answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host

    @classmethod
    async def open(cls, base: str) -> "HttpConnection":
        """Connect to `http://host:port`."""
        host = base.removeprefix("http://")
        name, _, port = host.partition(":")
        reader, writer = await asyncio.open_connection(name, int(port))
        return cls(reader, writer, host)

    async def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, bytes]:
        """Send a request and return the status and body of its answer."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join((*lines, "", "")).encode() + body)
        head = await self._reader.readuntil(b"\r\n\r\n")
        _, _, rest = head.lower().partition(b"\r\ncontent-length:")
        length = int(rest.partition(b"\r\n")[0])
        return int(head[9:12]), await self._reader.readexactly(length)

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()
