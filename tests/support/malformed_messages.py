"""Messages that no publisher can send, but that an older version or an operator may have written to a queue."""

import json
from typing import Any

from purveyor.queues.client import Queues

HALF = "\ud800"
"""Half of a surrogate pair: JSON can name it, UTF-8 cannot encode it."""
_EVENT: dict[str, Any] = {
    "publisher_name": "t",
    "ts": "2026-01-01T00:00:00Z",
    "realm": "udm",
    "topic": "users/user",
    "body": {"old": {}, "new": {"uuid": "u-1"}},
}
_TEXT = json.dumps(_EVENT)[:-1]


def _with(**more: Any) -> bytes:
    return json.dumps({**_EVENT, **more}).encode()


BODIES: dict[str, bytes] = {
    "half in an attribute name": _with(attributes={HALF: "x"}),
    "half in an attribute value": _with(attributes={"tenant": HALF}),
    "half in the realm": _with(realm=HALF),
    "half in the topic": _with(topic=HALF),
    "half in the key": _with(key=HALF),
    "half in the time": _with(ts=HALF),
    "half in the body": _with(message={"old": {}, "new": {HALF: HALF, "uuid": HALF}}),
    "half as raw bytes": _TEXT.encode() + b',"key":"\xed\xa0\x80"}',
    "line breaks in attributes": _with(attributes={"a\r\nb": "c\r\nx-evil: 1\r\n\r\nGET /", "\x00": "\x00"}),
    "line breaks everywhere": _with(realm="a\r\nb", topic="a\nb", key="a\rb", ts="\r\n"),
    "not latin-1": _with(attributes={"Größe ☃": "雪 ☃"}, realm="☃", topic="雪/☃", key="雪"),
    "attributes of other kinds": _with(attributes={"n": 1, "none": None, "list": [1], "object": {"a": 1}, "yes": True}),
    "attributes that are no object": _with(attributes=[1, 2]),
    "a number that is none": _TEXT.encode() + b',"attributes":{"n":NaN,"m":Infinity}}',
    "a huge number": _TEXT.encode() + b',"attributes":{"n":1e999},"key":1e999}',
    "a huge whole number": _TEXT.encode() + b',"more":' + b"9" * 5000 + b"}",
    "a huge number as key": b'{"body":{"new":{"id":' + b"9" * 4200 + b"}}}",
    "nested deeply": _TEXT.encode() + b',"attributes":{"deep":' + b"[" * 9000 + b"]" * 9000 + b"}}",
    "fields of other kinds": _with(realm=1, topic=None, key=[], ts={}, message="x"),
    "no fields": b"{}",
    "a list": b"[]",
    "null": b"null",
    "nothing": b"",
    "broken JSON": b'{"realm": "udm", "topic"',
    "broken JSON in braces": b"{realm: udm}",
    "two objects": b'{"a":1} {"b":2}',
    "not UTF-8": b'{"realm":"K\xf6ln"}',
    "bytes": bytes(range(256)),
}
HEADERS: dict[str, bytes] = {
    "an id with a line break": b"Purveyor-Id: a\nx-evil: 1",
    "an id that is not UTF-8": b"Purveyor-Id: K\xf6ln",
    "an id that is not latin-1": "Purveyor-Id: ☃".encode(),
    "an empty id": b"Purveyor-Id: ",
    "a huge position": b"Purveyor-Position: " + b"9" * 5000,
    "a position beyond 64 bits": b"Purveyor-Position: " + b"9" * 30,
    "a position that is none": "Purveyor-Position: ²".encode(),
    "a huge count": b"Purveyor-Retries: " + b"9" * 5000 + b"\r\nPurveyor-Letter: " + b"9" * 5000,
    "a name that is no name": "Größe: x\r\na b: c".encode(),
    "a time that is none": b"Purveyor-Failed-First: " + b"9" * 100,
    "a trace that is none": b"traceparent: 00-x\ny\r\ntracestate: a\nb",
    "many headers": b"\r\n".join(b"h%d: v" % number for number in range(500)),
}
ALL: dict[str, tuple[bytes, bytes]] = {
    **{name: (body, b"") for name, body in BODIES.items()},
    **{name: (_with(), line) for name, line in HEADERS.items()},
}
"""By its defect: the body of a message, and its header lines."""


async def put(queues: Queues, subject: str, body: bytes, lines: bytes = b"") -> None:
    """Store a message without any check."""
    block = b"NATS/1.0\r\n" + lines + b"\r\n\r\n" if lines else b""
    answer = await queues.connection.request(subject, body, headers=block)
    assert "seq" in json.loads(answer.data), answer.data
