"""The cookie of a synchronisation: the state of the directory that a client knows.

A cookie of OpenLDAP is `rid=000,sid=001,csn=<csn>;<csn>,delcsn=<csn>`, with one CSN (change sequence number) for each
server of a multi-master installation. Three of its rules matter:

- After a refresh the cookie has the CSNs of all servers: it replaces the old one. A CSN that the server does not know
  must go, because a present phase has removed what that CSN covers.
- A cookie with a change in the persist stage has only the CSN of that change: it is merged by server id.
- `sid` is the id of the server itself. A client that sends it back is taken for that server, and slapd then keeps
  back all changes that were made there. `delcsn` is a place inside of one refresh. Neither is stored.

Cookies of other servers are opaque: the newest one is kept as it is.
"""

import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Self

from purveyor.model.errors import InvalidInput

_CSN: Final = re.compile(r"\d{14}(?:\.\d{1,6})?Z#[0-9a-fA-F]{6}#([0-9a-fA-F]{2,3})#[0-9a-fA-F]{6}")


class CookieError(InvalidInput):
    """A cookie that is not one of OpenLDAP."""


@dataclass(frozen=True, slots=True)
class SyncCookie:
    """A cookie of OpenLDAP."""

    csns: tuple[str, ...] = ()
    """One CSN for each server, in the order of server ids."""
    rid: int | None = None
    """The number that the client gave itself."""
    sid: int | None = None
    """The id of the server that sent the cookie."""
    delcsn: str | None = field(default=None)
    """How far the delete phase of a refresh is."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a cookie, without parts that this program does not know; CookieError if it is not one of OpenLDAP."""
        fields: dict[str, str] = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            if not equals or name in fields:
                raise CookieError(f"cookie {text[:200]!r} has an invalid part {part[:50]!r}")
            fields[name] = value
        if not fields.keys() & {"rid", "csn"}:
            raise CookieError(f"cookie {text[:200]!r} is not one of OpenLDAP")
        csns = [csn for csn in fields.get("csn", "").split(";") if csn]
        delcsn = fields.get("delcsn") or None
        for csn in [*csns, *([delcsn] if delcsn else [])]:
            server_of(csn)
        try:
            rid = int(fields["rid"]) if "rid" in fields else None
            sid = int(fields["sid"], 16) if "sid" in fields else None
        except ValueError:
            raise CookieError(f"cookie {text[:200]!r}: rid and sid are numbers") from None
        return cls(_newest_by_server(csns), rid, sid, delcsn)

    def __str__(self) -> str:
        parts = [] if self.rid is None else [f"rid={self.rid:03d}"]
        parts += [] if self.sid is None else [f"sid={self.sid:03x}"]
        parts += [f"csn={';'.join(self.csns)}"] if self.csns else []
        parts += [f"delcsn={self.delcsn}"] if self.delcsn else []
        return ",".join(parts)

    def merge(self, newer: "SyncCookie") -> "SyncCookie":
        """Return the newest CSN of each server in either cookie."""
        return SyncCookie(_newest_by_server([*self.csns, *newer.csns]), rid=0)

    def to_store(self) -> str:
        """Return the text to keep and to send in the next request: without `sid` and `delcsn`."""
        return str(SyncCookie(self.csns, rid=0))


def server_of(csn: str) -> int:
    """Return the id of the server that made a change.

    >>> server_of("20261119041842.123456Z#000000#00a#000000")
    10
    """
    match = _CSN.fullmatch(csn)
    if match is None:
        raise CookieError(f"{csn[:100]!r} is no CSN")
    return int(match[1], 16)


def move_back(cookie: str) -> str:
    """Return a cookie for the moment before its last changes, so that the server sends these again.

    slapd says that nothing has changed since its own last CSN. After a crash this CSN can be older than a deletion: it
    is the newest one of the entries that are left. From a cookie of the moment before, slapd compares all entries.

    >>> move_back("rid=000,csn=20261119000000.000000Z#000000#001#000000")
    'rid=000,csn=20261118235959.999999Z#000000#001#000000'
    """
    try:
        known = SyncCookie.parse(cookie)
        return str(replace(known, csns=tuple(_before(csn) for csn in known.csns)))
    except (CookieError, ValueError, OverflowError):
        return cookie


def drop_empty_cookie(cookie: str | None) -> str | None:
    """Return None for a cookie without a CSN: slapd answers it with the whole content, as if there were none."""
    if cookie is None:
        return None
    try:
        return cookie if SyncCookie.parse(cookie).csns else None
    except CookieError:
        return cookie


def replace_cookie(known: str | None, received: bytes | None) -> str | None:
    """Return the cookie to keep after a refresh: the received one, or the known one if the server sent none."""
    if received is None:
        return known
    text = _text(received)
    try:
        cookie = SyncCookie.parse(text)
    except CookieError:
        return text
    return cookie.to_store() if cookie.csns else known


def merge_cookie(known: str | None, received: bytes) -> str:
    """Return the cookie to keep after a change in the persist stage."""
    text = _text(received)
    try:
        newer = SyncCookie.parse(text)
    except CookieError:
        return text
    try:
        older = SyncCookie.parse(known) if known is not None else SyncCookie()
    except CookieError:
        older = SyncCookie()
    return older.merge(newer).to_store()


def _before(csn: str) -> str:
    time, _, rest = csn.partition("Z#")
    pattern = "%Y%m%d%H%M%S.%f" if "." in time else "%Y%m%d%H%M%S"
    before = datetime.strptime(time, pattern).replace(tzinfo=UTC) - timedelta(microseconds=1)
    return f"{before:%Y%m%d%H%M%S.%f}Z#{rest}"


def _newest_by_server(csns: list[str]) -> tuple[str, ...]:
    newest: dict[int, str] = {}
    for csn in csns:
        server = server_of(csn)
        if csn > newest.get(server, ""):
            newest[server] = csn
    return tuple(newest[server] for server in sorted(newest))


def _text(received: bytes) -> str:
    try:
        return received.decode()
    except UnicodeDecodeError:
        raise CookieError(f"the server sent a cookie that is not UTF-8: {received[:50]!r}") from None
