"""An HTTP endpoint in its own process. The path, or the message itself, decides how it answers.

    /ok            204, and records the request
    /status/NNN    that status (with ?retry-after=s a Retry-After)
    /slow/S        204 after S seconds
    /hang          announces 10 bytes and sends 3
    /close         closes the connection without a response
    /drop          answers 204 and closes the connection without `connection: close`
    /short         announces 100 bytes, sends 5, and closes
    /long          announces 2 bytes and sends 100
    /endless       200, and a body without end
    /redirect      302 to /ok
    /stream        200, chunked, in two pieces
    /until-close   200 without a length, ended by closing
    /notice        103 first, 204 then
    /garbage       not HTTP
    /script        the status that the message asks for: `new.script` lists one for each attempt, then 204

`GET /seen` returns all requests with their status as JSON; `POST /set/NNN` sets the status of /configured.
"""

import asyncio
import base64
import json
import sys
from collections import Counter
from typing import Any
from urllib.parse import parse_qs, urlsplit

import uvloop

SEEN: list[dict[str, Any]] = []
ATTEMPTS: Counter[str] = Counter()
STATE = {"status": 204, "open": 0, "most": 0}


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    STATE["open"] += 1
    STATE["most"] = max(STATE["most"], STATE["open"])
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *lines = head.split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines if each)
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            method, target, _ = line.split(" ")
            if not await answer(writer, method, target, headers, body):
                break
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        STATE["open"] -= 1
        writer.close()


async def answer(writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str], body: bytes) -> bool:
    """Return whether the connection stays open."""
    url = urlsplit(target)
    word, _, rest = url.path.strip("/").partition("/")
    if method == "GET":
        return await plain(writer, 200, json.dumps({"seen": SEEN, "most": STATE["most"]}).encode())
    if word == "set":
        STATE["status"] = int(rest)
        return await plain(writer, 200)
    about = parse_message(headers, body)
    status = 204
    if word == "status":
        status = int(rest)
    elif word == "configured":
        status = STATE["status"]
    elif word == "script":
        script = about["script"]
        count = ATTEMPTS[about["id"]]
        status = script[count] if count < len(script) else 204
        ATTEMPTS[about["id"]] += 1
    elif word == "slow":
        await asyncio.sleep(float(rest))
    SEEN.append({**about, "path": target, "status": status, "headers": headers, "body": body.decode("latin-1")})
    if word in SPECIAL_RESPONSES:
        return await SPECIAL_RESPONSES[word](writer)
    after = parse_qs(url.query).get("retry-after", [""])[0] or None
    return await plain(writer, status, b"" if status in (204, 102, 304) else b"said " + word.encode(), after)


def parse_message(headers: dict[str, str], body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
        wrapped = given.get("message")
        event = json.loads(base64.b64decode(wrapped["data"])) if wrapped else given
        new = event["body"]["new"] or event["body"]["old"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return {"id": headers.get("webhook-id", ""), "key": None, "n": None, "script": []}
    attempt = given.get("deliveryAttempt") if wrapped else None
    return {
        "id": headers.get("webhook-id", ""),
        "key": new.get("uuid"),
        "n": new.get("n"),
        "script": new.get("script", []),
        "attempt": attempt,
    }


async def plain(writer: asyncio.StreamWriter, status: int, body: bytes = b"", after: str | None = None) -> bool:
    length = "" if status in (204, 102, 304) else f"Content-Length: {len(body)}\r\n"
    more = f"Retry-After: {after}\r\n" if after else ""
    writer.write(f"HTTP/1.1 {status} So\r\n{length}{more}\r\n".encode() + body)
    await writer.drain()
    return True


async def hang(writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
    await asyncio.sleep(3600)
    return False


async def close(writer: asyncio.StreamWriter) -> bool:
    return False


async def drop(writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    return False


async def short(writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort")
    return False


async def long(writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n" + b"x" * 100)
    return True


async def endless(writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        await writer.drain()


async def redirect(writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 302 Found\r\nLocation: /ok\r\nContent-Length: 0\r\n\r\n")
    return True


async def stream(writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
    await writer.drain()
    await asyncio.sleep(0.01)
    writer.write(b"2\r\ncd\r\n0\r\n\r\n")
    return True


async def until_close(writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
    return False


async def notice(writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
    await writer.drain()
    await asyncio.sleep(0.01)
    writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    return True


async def garbage(writer: asyncio.StreamWriter) -> bool:
    writer.write(b"+OK POP3 ready\r\n")
    return True


SPECIAL_RESPONSES = {
    "hang": hang,
    "close": close,
    "drop": drop,
    "short": short,
    "long": long,
    "endless": endless,
    "redirect": redirect,
    "stream": stream,
    "until-close": until_close,
    "notice": notice,
    "garbage": garbage,
}


async def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    # Attributes are headers of the raw form, and may be many.
    server = await asyncio.start_server(serve, "127.0.0.1", port, limit=4 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
