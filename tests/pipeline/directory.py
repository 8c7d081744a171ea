"""A directory that changes at random: the LDIF of each change, and the expected event."""

from dataclasses import dataclass, field
from random import Random
from typing import Any
from uuid import UUID

PERSON, GROUP = "users/user", "groups/group"
PEOPLE = "ou=people,dc=example"
DEPARTMENTS = ("sales", "research", "support")
SHOWN = {
    "username": "uid",
    "name": "cn",
    "displayName": "displayName",
    "description": "description",
    "departmentNumber": "departmentNumber",
    "users": "member",
}
"""What is compared of an object: properties of the mapping `udm`, and their attributes."""

Object = dict[str, Any]


@dataclass(frozen=True)
class Expected:
    """One event: whom it is about, and what it must say."""

    topic: str
    key: str
    old: Object
    new: Object


@dataclass
class Directory:
    """Entries by their key, after all changes up to now."""

    random: Random
    objects: dict[str, tuple[str, Object]] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=lambda: {PERSON: [], GROUP: []})
    expected: list[Expected] = field(default_factory=list)
    made: int = 0

    def change(self) -> str:
        """One more record."""
        choice, people, groups = self.random.random(), self.keys[PERSON], self.keys[GROUP]
        if len(people) < 5 or choice < 0.35:
            return self._add_person()
        if choice < 0.45 or not groups:
            return self._add_group(self.random.choice(people))
        if choice < 0.75:
            return self._modify(self.random.choice(self.random.choice((people, groups))))
        if choice < 0.87:
            return self._rename(self.random.choice(people))
        return self._delete(self.random.choice((people, people, groups)))

    def _add_person(self) -> str:
        number, key = self._next()
        new: Object = {
            "dn": f"uid=u{number},{PEOPLE}",
            "uid": f"u{number}",
            "displayName": f"Person {number}",
            "description": "new",
            "departmentNumber": [self.random.choice(DEPARTMENTS)],
        }
        lines = ["objectClass: inetOrgPerson", "sn: Person", "cn: Person"]
        return self._add(PERSON, key, new, lines)

    def _add_group(self, member: str) -> str:
        number, key = self._next()
        new: Object = {"dn": f"cn=g{number},{PEOPLE}", "cn": f"g{number}", "description": "new"}
        new["member"] = [self.objects[member][1]["dn"]]
        return self._add(GROUP, key, new, ["objectClass: groupOfNames"])

    def _add(self, topic: str, key: str, new: Object, lines: list[str]) -> str:
        given = [f"entryUUID: {key}", *lines]
        for name, value in new.items():
            if name != "dn":
                given += [f"{name}: {each}" for each in (value if isinstance(value, list) else [value])]
        self._tell(topic, key, {}, new)
        self.keys[topic].append(key)
        return _record(new["dn"], "add", *given)

    def _modify(self, key: str) -> str:
        topic, old = self.objects[key]
        new = {**old, "description": f"change {len(self.expected)}"}
        lines = ["replace: description", f"description: {new['description']}", "-"]
        if topic == PERSON:
            new["departmentNumber"] = [self.random.choice(DEPARTMENTS)]
            lines += ["replace: departmentNumber", f"departmentNumber: {new['departmentNumber'][0]}", "-"]
        self._tell(topic, key, old, new)
        return _record(old["dn"], "modify", *lines)

    def _rename(self, key: str) -> str:
        topic, old = self.objects[key]
        uid = f"{str(old['uid']).split('-')[0]}-{len(self.expected)}"
        self._tell(topic, key, old, {**old, "uid": uid, "dn": f"uid={uid},{PEOPLE}"})
        return _record(old["dn"], "modrdn", f"newrdn: uid={uid}", "deleteoldrdn: 1")

    def _delete(self, keys: list[str]) -> str:
        at = self.random.randrange(len(keys))
        keys[at], keys[-1] = keys[-1], keys[at]
        key = keys.pop()
        topic, old = self.objects[key]
        self._tell(topic, key, old, {})
        return _record(old["dn"], "delete")

    def _tell(self, topic: str, key: str, old: Object, new: Object) -> None:
        self.expected.append(Expected(topic, key, old, new))
        if new:
            self.objects[key] = (topic, new)
        else:
            del self.objects[key]

    def _next(self) -> tuple[int, str]:
        self.made += 1
        return self.made, str(UUID(int=self.random.getrandbits(128), version=4))


def looked_at(obj: Object) -> Object:
    """The part of an object that is compared."""
    if not obj:
        return {}
    shown = {attribute: obj["properties"].get(name) for name, attribute in SHOWN.items()}
    return {"dn": obj["dn"], **{attribute: value for attribute, value in shown.items() if value not in (None, [])}}


def _record(dn: str, change: str, *lines: str) -> str:
    return "\n".join([f"dn: {dn}", f"changetype: {change}", *lines]) + "\n\n"
