"""Random changes of a slapd that may be killed in the midst of them, and what slapd says that it has."""

import base64
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.slapd import Slapd
from tests.support.waiting import wait_until

IN_FILTER = "(!(employeeType=out))"
"""A filter that units pass, and people until one of their attributes changes."""
_NAMES = tuple(f"n{number}" for number in range(12))
"""Few, so that an entry often gets the name that another one had."""
_DEEPEST = 4
_TOLERATED = ("DN index add failed", "Can't contact LDAP server", "ldap_result: ", "ldap_bind: ")
"""slapd 2.5 refuses some renames into a unit into which a sibling was moved; the others are a slapd that was killed."""


@dataclass
class Known:
    """An entry of the model."""

    rdn: str
    parent: int
    is_unit: bool
    is_out: bool = False


@dataclass(frozen=True)
class Found:
    """An entry as slapd returns it."""

    dn: str
    attributes: dict[str, list[str]]

    def values(self, name: str) -> list[str]:
        return self.attributes.get(name, [])

    @property
    def uuid(self) -> str:
        return self.values("entryUUID")[0]


class DirectoryChanges:
    """A tree below one unit that changes: add, modify, delete, modrdn, moves, and people who leave a filter."""

    def __init__(self, slapd: Slapd, root: str, dice: random.Random, *, most_entries: int) -> None:
        self.applied = 0
        """The number of changes that were sent to slapd."""
        self.refused = 0
        self._slapd = slapd
        self._root = root
        self._dice = dice
        self._most_entries = most_entries
        self._entries: dict[int, Known] = {}
        self._numbers = 0
        self._changed = threading.Condition()

    def apply(self, count: int) -> None:
        """Make this many changes, in groups; go on after a crash of slapd, when it is back, with what it has."""
        end = self.applied + count
        while self.applied < end:
            group = [self._draw() for _ in range(min(self._dice.randrange(1, 6), end - self.applied))]
            try:
                self._slapd.apply("\n".join(group))
            except AssertionError as error:
                if not any(words in str(error) for words in _TOLERATED):
                    raise
                self.refused += 1
                self._read_again()
            with self._changed:
                self.applied += len(group)
                self._changed.notify_all()

    def wait_for(self, applied: int) -> None:
        """Wait in another thread until this many changes were sent."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.applied >= applied, timeout=600)

    def _read_again(self) -> None:
        found = wait_until(
            lambda: list(read_entries(self._slapd, self._root)), what="slapd", ignoring=(AssertionError,)
        )
        numbers: dict[str, int] = {self._root: 0}
        self._entries = {}
        for entry in sorted(found, key=lambda each: each.dn.count(",")):
            rdn, _, parent = entry.dn.partition(",")
            if entry.dn != self._root:
                self._numbers += 1
                numbers[entry.dn] = self._numbers
                is_unit = "organizationalUnit" in entry.values("objectClass")
                is_out = entry.values("employeeType") == ["out"]
                self._entries[self._numbers] = Known(rdn, numbers[parent], is_unit, is_out)

    def _dn(self, number: int) -> str:
        if not number:
            return self._root
        return f"{self._entries[number].rdn},{self._dn(self._entries[number].parent)}"

    def _draw(self) -> str:
        self._numbers += 1
        dice, known = self._dice, list(self._entries)
        wish = dice.random()
        if not known or (wish < 0.35 and len(known) < self._most_entries):
            return self._add()
        number = dice.choice(known)
        entry = self._entries[number]
        record = f"dn: {self._dn(number)}\nchangetype: "
        if wish < 0.5 and all(each.parent != number for each in self._entries.values()):
            del self._entries[number]
            return f"{record}delete\n"
        if wish < 0.6 and not entry.is_unit:
            entry.is_out = not entry.is_out
            return f"{record}modify\nreplace: employeeType\nemployeeType: {'out' if entry.is_out else 'in'}\n-\n"
        if wish > 0.8:
            renamed = self._rename(number)
            if renamed:
                return f"{record}{renamed}"
        return f"{record}modify\nreplace: description\ndescription: {self._numbers}\n-\n"

    def _add(self) -> str:
        is_unit = self._dice.random() < 0.4
        kind = "ou" if is_unit else "cn"
        parents = [0, *(each for each in self._entries if self._entries[each].is_unit and self._depth(each) < _DEEPEST)]
        parent = self._dice.choice(parents)
        rdn = self._free_name(kind, parent) or f"{kind}=x{self._numbers}"
        self._entries[self._numbers] = Known(rdn, parent, is_unit)
        name = rdn.partition("=")[2]
        classes = ("organizationalUnit",) if is_unit else ("inetOrgPerson",)
        lines = [f"dn: {self._dn(self._numbers)}", "changetype: add", *(f"objectClass: {each}" for each in classes)]
        lines += [f"{kind}: {name}", f"description: {self._numbers}", *([] if is_unit else [f"sn: sn {name}"])]
        return "\n".join(lines) + "\n"

    def _rename(self, number: int) -> str | None:
        """Rename an entry, move it with all entries below, or both."""
        entry = self._entries[number]
        kind = "ou" if entry.is_unit else "cn"
        parent = entry.parent
        if self._dice.random() < 0.5:
            targets = [0, *(each for each, other in self._entries.items() if other.is_unit)]
            targets = [each for each in targets if not self._is_below(each, number) and self._depth(each) < _DEEPEST]
            parent = self._dice.choice(targets)
        rdn = entry.rdn
        if parent == entry.parent or self._is_taken(rdn, parent):
            found = self._free_name(kind, parent)
            if found is None:
                return None
            rdn = found
        superior = f"newsuperior: {self._dn(parent)}\n" if parent != entry.parent else ""
        entry.rdn, entry.parent = rdn, parent
        return f"modrdn\nnewrdn: {rdn}\ndeleteoldrdn: 1\n{superior}"

    def _free_name(self, kind: str, parent: int) -> str | None:
        free = [rdn for name in _NAMES if not self._is_taken(rdn := f"{kind}={name}", parent)]
        return self._dice.choice(free) if free else None

    def _is_taken(self, rdn: str, parent: int) -> bool:
        return any((each.rdn, each.parent) == (rdn, parent) for each in self._entries.values())

    def _depth(self, number: int) -> int:
        return 1 + self._depth(self._entries[number].parent) if number else 0

    def _is_below(self, number: int, ancestor: int) -> bool:
        while number and number != ancestor:
            number = self._entries[number].parent
        return number == ancestor


def read_entries(slapd: Slapd, base: str, search_filter: str = "(objectClass=*)") -> Iterator[Found]:
    """Read entries with ldapsearch, with their operational attributes."""
    text = slapd.run("ldapsearch", "-LLL", "-o", "ldif-wrap=no", "-b", base, search_filter, "*", "+")
    for block in text.strip().split("\n\n"):
        attributes: dict[str, list[str]] = {}
        for line in block.splitlines():
            name, _, value = line.partition(":")
            if value.startswith(":"):
                value = base64.b64decode(value[1:]).decode(errors="replace")
            attributes.setdefault(name, []).append(value.strip())
        if attributes:
            yield Found(attributes["dn"][0], attributes)


__all__ = ["IN_FILTER", "DirectoryChanges", "Found", "read_entries"]
