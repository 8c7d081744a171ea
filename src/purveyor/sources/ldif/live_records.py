"""The records of a source that follows a directory, and their messages in the queue `ldif`, which the transform reads.

The directory's own identity of an entry, its entryUUID, identifies it: an entry under another DN is renamed or moved.
A record about a whole entry describes it as it is now; what it was before is in the transform's state.

The subject is `ldif.<source>`, as for LDIF, and the body one JSON object with `change`, `epoch` and:

| change | fields |
|---|---|
| `refresh-begin` | `full`: every entry follows, as for a source that begins; else only what changed since its cookie |
| `entry` | `uuid`, `dn`, `attributes`: the whole entry |
| `gone` | `uuids`: exactly these entries are no longer there; nothing is said about entries below them |
| `present` | `uuids`: these entries are there, unchanged since they were sent |
| `refresh-end` | `remove_unseen`: what had no `entry` or `present` since `refresh-begin` is gone; `csns` |
| `add`, `modify`, `delete`, `modrdn` | the fields of LDIF without `line`, and `uuid`, `csn`, perhaps `catch_up` |

- `epoch` is a whole number that grows with each process that takes over the source. The transform drops the records of
  an earlier process that was only paused.
- A refresh is everything between `refresh-begin` and `refresh-end`. Each connection by RFC 4533 begins with one, even
  if nothing changed. A source that starts over sends `refresh-begin` again, and the set of seen entries is empty again.
  Outside of a refresh, records are changes as they happen.
- A refresh that is not full begins with a cookie that is not newer than the end of the last complete refresh or the
  last change that was acknowledged before the source began to refresh. So a source deletes its stored cookie before it
  begins a full one, and stores a cookie that comes within a refresh only after `refresh-end`.
- `csns` are the contextCSNs of the directory at the end of the refresh, one for each server id.
- `catch_up` marks operations of the accesslog that the refresh before may contain already, or that are about entries
  it did not see: the transform ignores those that have no effect any more.

After a crash a source begins a new refresh from its stored cookie, with the entries as they are then, or sends
operations of the accesslog again, in their order, from any one on: what was applied before has no effect.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, assert_never

from purveyor.model.ldif_changes import Gone, LiveChange, Present, RefreshBegin, RefreshEnd
from purveyor.sources.ldif.records import Attributes, Record, attribute_fields, encode_fields, record_fields


@dataclass(frozen=True, slots=True)
class LiveEntry:
    """A whole entry as it is now."""

    uuid: str
    """The entryUUID as text, such as `0f8fad5b-d9cb-469f-a165-70867728950e`."""
    dn: str
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the accesslog: an add, modify, delete or modrdn. Its record has no line."""

    record: Record
    uuid: str
    csn: str
    catch_up: bool = False


LiveRecord: TypeAlias = RefreshBegin | LiveEntry | Gone | Present | RefreshEnd | Operation


def encode_live_record(record: LiveRecord, epoch: int) -> bytes:
    """Return the body of a record's message.

    >>> encode_live_record(Gone(("0f8fad5b-d9cb-469f-a165-70867728950e",)), 3)
    b'{"change":"gone","epoch":3,"uuids":["0f8fad5b-d9cb-469f-a165-70867728950e"]}'
    >>> encode_live_record(LiveEntry("0f8fad5b-d9cb-469f-a165-70867728950e", "cn=a", {"cn": (b"a",)}), 3)[-84:]
    b'"uuid":"0f8fad5b-d9cb-469f-a165-70867728950e","dn":"cn=a","attributes":{"cn":["a"]}}'
    """
    return encode_fields(_fields(record, epoch))


def _fields(record: LiveRecord, epoch: int) -> Mapping[str, Any]:
    match record:
        case RefreshBegin():
            return {**_head(LiveChange.REFRESH_BEGIN, epoch), "full": record.full}
        case LiveEntry():
            named = {"uuid": record.uuid, "dn": record.dn, "attributes": attribute_fields(record.attributes)}
            return {**_head(LiveChange.ENTRY, epoch), **named}
        case Gone():
            return {**_head(LiveChange.GONE, epoch), "uuids": list(record.uuids)}
        case Present():
            return {**_head(LiveChange.PRESENT, epoch), "uuids": list(record.uuids)}
        case RefreshEnd():
            end = {"remove_unseen": record.remove_unseen, "csns": list(record.csns)}
            return {**_head(LiveChange.REFRESH_END, epoch), **end}
        case Operation():
            known = {"epoch": epoch, "uuid": record.uuid, "csn": record.csn}
            return {**record_fields(record.record), **known, **({"catch_up": True} if record.catch_up else {})}
        case _:
            assert_never(record)


def _head(change: LiveChange, epoch: int) -> dict[str, Any]:
    return {"change": change.value, "epoch": epoch}


def split_uuids(uuids: Iterable[str], most: int) -> Iterable[tuple[str, ...]]:
    """Yield uuids in groups, for several `Gone` or `Present`.

    >>> list(split_uuids("abc", 2))
    [('a', 'b'), ('c',)]
    """
    group: list[str] = []
    for each in uuids:
        group.append(each)
        if len(group) == most:
            yield tuple(group)
            group = []
    if group:
        yield tuple(group)
