"""From the values of an LDAP attribute to the JSON value of a property. Pure."""

import base64
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from purveyor.pipeline.transform.directory_records import InvalidRecord, Value, fold_value, parse_dn, rdn_values

_TIME: Final = re.compile(r"(\d{4})(\d\d)(\d\d)(\d\d)(?:(\d\d)(\d\d)?)?(?:[.,](\d+))?(?:(Z)|([+-])(\d\d)(\d\d)?)")
_GROUP_CONTAINERS: Final = frozenset({"groups", "builtin"})
"""The names of containers whose entries are groups."""


class PropertyType(Enum):
    """How the values of a property are written in JSON."""

    STRING = "string"
    INT = "int"
    BOOL = "bool"
    BINARY = "binary"
    """As base64."""
    TIME = "time"
    """ISO 8601, in UTC."""
    RID = "rid"
    """The last number of a security identifier (SID)."""


def convert_value(kind: PropertyType, value: Value) -> Any:
    """Convert a value to its type; raise ValueError or OverflowError if it is not of that type."""
    return _CONVERT[kind](value)


def _string(value: Value) -> str:
    if not isinstance(value, str):
        raise ValueError("not text")  # noqa: TRY004 - the same for every value that does not fit
    return value


def _int(value: Value) -> int:
    return int(_string(value))


def _bool(value: Value) -> bool:
    word = _string(value).lower()
    if word not in ("true", "false"):
        raise ValueError("not a boolean")
    return word == "true"


def _binary(value: Value) -> str:
    return base64.b64encode(value.encode()).decode() if isinstance(value, str) else value["base64"]


def _rid(value: Value) -> int:
    return int(_string(value).rpartition("-")[2])


def _time(value: Value) -> str:
    """Convert LDAP's generalized time.

    >>> _time("20260131120000Z"), _time("202601311200+0130")
    ('2026-01-31T12:00:00+00:00', '2026-01-31T10:30:00+00:00')
    """
    found = _TIME.fullmatch(_string(value))
    if found is None:
        raise ValueError("not a generalized time")
    year, month, day, hour, minute, second, fraction, utc, sign, off_hours, off_minutes = found.groups()
    offset = timedelta(0) if utc else timedelta(hours=int(off_hours), minutes=int(off_minutes or 0))
    zone = timezone(-offset if sign == "-" else offset)
    seconds = min(int(second or 0), 59)  # 60 is a leap second
    moment = datetime(int(year), int(month), int(day), int(hour), int(minute or 0), seconds, tzinfo=zone)
    unit = timedelta(seconds=1) if second else timedelta(minutes=1) if minute else timedelta(hours=1)
    if fraction:
        moment += unit * float(f"0.{fraction}")
    return moment.astimezone(UTC).isoformat()


_CONVERT: Final = {
    PropertyType.STRING: _string,
    PropertyType.INT: _int,
    PropertyType.BOOL: _bool,
    PropertyType.BINARY: _binary,
    PropertyType.TIME: _time,
    PropertyType.RID: _rid,
}


class MemberKind(Enum):
    """What a member of a group is."""

    USERS = "users"
    GROUPS = "groups"
    HOSTS = "hosts"


class GroupMembers:
    """Decides what the members of a group are: as `known`, else by their names, the group's name, and its memberUid.

    >>> people, groups = "ou=people,dc=e", "cn=groups,dc=e"
    >>> members = GroupMembers(f"cn=all,{groups}", ["pc1$"], {"cn=x,dc=e": "hosts"})
    >>> [members.kind(name).value for name in (
    ...     f"uid=ada,{people}", f"cn=Ada,{people}", f"cn=admins,{groups}", "cn=pc1,cn=computers,dc=e", "cn=x,dc=e")]
    ['users', 'users', 'groups', 'hosts', 'hosts']
    """

    def __init__(self, group: str, member_uids: Sequence[Value], known: Mapping[str, str] | None = None) -> None:
        self._known = known or {}
        self._hosts = frozenset(each for each in member_uids if isinstance(each, str) and each.endswith("$"))
        try:
            position = ",".join(parse_dn(group).rdns[1:])
            self._position = parse_dn(position).key if position else ""
        except InvalidRecord:
            self._position = ""

    def kind(self, member: str) -> MemberKind:
        """Return what a member is."""
        if is_named_by_uid(member):
            return MemberKind.USERS
        known = self._known.get(member)
        return MemberKind(known) if known is not None else self.kind_by_name(member)

    def kind_by_name(self, member: str) -> MemberKind:
        """Return what a member is, as far as its name says."""
        name = _parse_member(member)
        if name is None:
            return MemberKind.USERS
        if f"{name.common_name}$" in self._hosts:
            return MemberKind.HOSTS
        is_group = name.is_below_groups or name.position == self._position
        return MemberKind.GROUPS if is_group else MemberKind.USERS


def is_named_by_uid(member: str) -> bool:
    """Return whether a member is surely a user. Most are like this."""
    return member[:4].lower() == "uid="


class _MemberName(NamedTuple):
    """The name of a member that is named by `cn`."""

    common_name: str
    position: str
    """The key of its parent."""
    is_below_groups: bool


@lru_cache(1 << 16)
def _parse_member(member: str) -> _MemberName | None:
    """Parse the name of a member; None if it is not an entry that is named by `cn` alone, and below another one."""
    try:
        name = parse_dn(member)
        own = dict(rdn_values(name))
        if "cn" not in own or "uid" in own or len(name.rdns) == 1:
            return None
        containers = {fold_value(text) for rdn in name.rdns[1:] for _, text in rdn_values(parse_dn(rdn))}
        position = parse_dn(",".join(name.rdns[1:])).key
    except InvalidRecord:
        return None
    return _MemberName(own["cn"], position, bool(containers & _GROUP_CONTAINERS))
