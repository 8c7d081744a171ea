"""A model of a directory server and of a source that follows it, by RFC 4533 or by the accesslog."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from purveyor.model.ldif_changes import Change, Gone, Present, RefreshBegin, RefreshEnd, Step
from purveyor.sources.ldif.live_records import LiveEntry, LiveRecord, Operation
from purveyor.sources.ldif.records import Modification, Record

ROOT = "00000000-0000-4000-8000-000000000000"


def uuid_of(number: int) -> str:
    """A UUID of time, as slapd makes them."""
    return f"{number * 7919 % 0xFFFFFFFF:08x}-0000-1000-8000-{number:012x}"


def csn_of(number: int) -> str:
    return f"20261119000000.{number:06}Z#000000#001#000000"


@dataclass(frozen=True)
class Node:
    """An entry: its own rdn, its parent by uuid, a value, and the CSN of its last change."""

    rdn: str
    parent: str | None
    title: str
    csn: int


@dataclass
class Server:
    """A directory with all its operations. Entries lie below one root."""

    nodes: dict[str, Node] = field(default_factory=lambda: {ROOT: Node("dc=e", None, "", 1)})
    now: int = 1
    operations: list[Operation] = field(default_factory=list)
    deleted: list[tuple[int, str]] = field(default_factory=list)

    def dn(self, uuid: str) -> str:
        node = self.nodes[uuid]
        return node.rdn if node.parent is None else f"{node.rdn},{self.dn(node.parent)}"

    def entry(self, uuid: str) -> LiveEntry:
        node = self.nodes[uuid]
        kind, _, name = node.rdn.partition("=")
        values = {kind: name, "objectClass": "device", "title": node.title, "entryUUID": uuid}
        attributes = {name: (value.encode(),) for name, value in values.items()}
        return LiveEntry(uuid, self.dn(uuid), {**attributes, "entryCSN": (csn_of(node.csn).encode(),)})

    def entries(self) -> dict[str, LiveEntry]:
        return {uuid: self.entry(uuid) for uuid in self.nodes}

    def add(self, rdn: str, parent: str) -> str | None:
        if self._taken(rdn, parent):
            return None
        self.now += 1
        uuid = uuid_of(self.now)
        self.nodes[uuid] = Node(rdn, parent, "", self.now)
        made = self.entry(uuid)
        self._log(uuid, Record(0, made.dn, Change.ADD, attributes=made.attributes))
        return uuid

    def modify(self, uuid: str, title: str) -> None:
        self.now += 1
        self.nodes[uuid] = replace(self.nodes[uuid], title=title, csn=self.now)
        step = Modification(Step.REPLACE, "title", (title.encode(),))
        self._log(uuid, Record(0, self.dn(uuid), Change.MODIFY, modifications=(step,)))

    def delete(self, uuid: str) -> bool:
        if uuid == ROOT or any(node.parent == uuid for node in self.nodes.values()):
            return False
        self.now += 1
        dn = self.dn(uuid)
        del self.nodes[uuid]
        self.deleted.append((self.now, uuid))
        self._log(uuid, Record(0, dn, Change.DELETE))
        return True

    def rename(self, uuid: str, rdn: str, parent: str) -> bool:
        if uuid == ROOT or self._taken(rdn, parent) or uuid in self._above(parent):
            return False
        self.now += 1
        dn, moved = self.dn(uuid), parent != self.nodes[uuid].parent
        self.nodes[uuid] = replace(self.nodes[uuid], rdn=rdn, parent=parent, csn=self.now)
        superior = self.dn(parent) if moved else None
        self._log(uuid, Record(0, dn, Change.MODRDN, new_rdn=rdn, delete_old_rdn=True, new_superior=superior))
        return True

    def _taken(self, rdn: str, parent: str) -> bool:
        return any((node.rdn, node.parent) == (rdn, parent) for node in self.nodes.values())

    def _above(self, uuid: str | None) -> Iterator[str]:
        while uuid is not None:
            yield uuid
            uuid = self.nodes[uuid].parent

    def _log(self, uuid: str, record: Record) -> None:
        self.operations.append(Operation(record, uuid, csn_of(self.now)))


Emit = Callable[[LiveRecord, int], None]


@dataclass
class Source:
    """A program that follows a server and emits records with its epoch. The cookie is a CSN of the server."""

    server: Server
    emit: Emit
    epoch: int = 1
    cookie: int = 0
    stored_cookie: int = 0
    connected: bool = False
    refreshing: list[LiveRecord] | None = None
    """The records of a refresh that are not sent yet."""
    later: list[LiveRecord] = field(default_factory=list)
    """Changes since the refresh began."""

    def send(self, record: LiveRecord) -> None:
        self.emit(record, self.epoch)

    def follow(self) -> None:
        """Emit the newest operation of the server, as the persist phase does."""
        operation = self.server.operations[-1]
        change: LiveRecord = (
            Gone((operation.uuid,)) if operation.record.change is Change.DELETE else self.server.entry(operation.uuid)
        )
        if self.refreshing is not None:
            self.later.append(change)
        elif self.connected:
            self.send(change)
            self.cookie = self.server.now

    def begin_refresh(self, kind: str, mix: Callable[[list[Any]], list[Any]]) -> None:
        """Compare the directory as it is now; `mix` gives the order of the entries."""
        server, full = self.server, kind == "full" or not self.cookie
        if full:  # the source deletes its cookie first
            self.cookie = self.stored_cookie = 0
        entries = server.entries()
        changed = [each for each in entries.values() if full or server.nodes[each.uuid].csn > self.cookie]
        same = [uuid for uuid in entries if server.nodes[uuid].csn <= self.cookie]
        gone = [uuid for csn, uuid in server.deleted if csn > self.cookie]
        records: list[LiveRecord] = list(changed)
        by_delete = kind == "delete" and not full
        if by_delete:
            records = [Gone(tuple(mix(gone))), *mix(records)]
        else:
            records = mix([*records, *(Present((uuid,)) for uuid in same if not full)])
        self.connected, self.later = False, []
        self.refreshing = [*records, RefreshEnd(not by_delete, (csn_of(server.now),))]
        self.cookie_of_refresh = server.now
        self.send(RefreshBegin(full))

    def continue_refresh(self, count: int) -> None:
        """Emit some more records of the refresh, and after its end the changes since it began."""
        if self.refreshing is None:
            return
        for record in self.refreshing[:count]:
            self.send(record)
        self.refreshing = self.refreshing[count:]
        if not self.refreshing:
            self.refreshing, self.connected = None, True
            self.cookie = self.server.now
            for record in self.later:
                self.send(record)

    def disconnect(self) -> None:
        self.connected, self.refreshing = False, None

    def store_cookie(self) -> None:
        """Store the cookie: everything before it was acknowledged."""
        self.stored_cookie = self.cookie

    def crash(self) -> None:
        """End; another process takes over from the cookie that was stored."""
        self.disconnect()
        self.epoch += 1
        self.cookie = self.stored_cookie
