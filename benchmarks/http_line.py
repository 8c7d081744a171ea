"""An HTTP client that costs next to nothing: the server is what is measured, and both share the machine."""

import asyncio
from collections.abc import Mapping


class HttpLine:
    """One connection that is kept. For servers that tell the length of every answer, as both sides here do."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host

    @classmethod
    async def to(cls, base: str) -> "HttpLine":
        """A connection to `http://host:port`."""
        host = base.removeprefix("http://")
        name, _, port = host.partition(":")
        reader, writer = await asyncio.open_connection(name, int(port))
        return cls(reader, writer, host)

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, bytes]:
        """The status and the body of an answer."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join((*lines, "", "")).encode() + body)
        head = await self._reader.readuntil(b"\r\n\r\n")
        _, _, rest = head.lower().partition(b"\r\ncontent-length:")
        length = int(rest.partition(b"\r\n")[0])
        return int(head[9:12]), await self._reader.readexactly(length)

    def close(self) -> None:
        """Hang up."""
        self._writer.close()
