"""A small directory for the demo: its entries and changes as LDIF, and its people after each step. Pure.

Nothing is random: two runs import the same bytes.
"""

from dataclasses import dataclass, replace

_BASE = "dc=example,dc=org"
_PEOPLE = f"ou=people,{_BASE}"
_GROUPS = f"ou=groups,{_BASE}"
_FIRST = ("Ada", "Alan", "Barbara", "Edsger", "Frances", "Grace", "Katherine", "Leslie", "Margaret", "Tim")
_LAST = ("Allen", "Dijkstra", "Hamilton", "Hopper", "Johnson", "Lamport", "Liskov", "Lovelace", "Turing", "Lee")


@dataclass(frozen=True, slots=True)
class Person:
    """An entry of a person; the number never changes."""

    number: int
    uid: str
    mail: str

    @property
    def dn(self) -> str:
        """Return the distinguished name."""
        return f"uid={self.uid},{_PEOPLE}"

    @property
    def uuid(self) -> str:
        """Return the identity, which never changes."""
        return f"10000000-0000-4000-8000-{self.number:012d}"


@dataclass(frozen=True, slots=True)
class Step:
    """A batch of records: LDIF, number of events, number of events about people, and the people after it."""

    ldif: str
    events: int
    about_people: int
    people: tuple[Person, ...]


def initial_entries(people: int, groups: int) -> Step:
    """Return the entries at the start."""
    made = tuple(Person(number, f"user{number}", f"user{number}@example.org") for number in range(people))
    records = [
        f"dn: {_BASE}\nobjectClass: domain\ndc: example\n",
        f"dn: {_PEOPLE}\nobjectClass: organizationalUnit\nou: people\n",
        f"dn: {_GROUPS}\nobjectClass: organizationalUnit\nou: groups\n",
        *(_content(person) for person in made),
        *(_group(number, made) for number in range(groups)),
    ]
    return Step("\n".join(records), len(records), people, made)


def changes(before: Step, round_: int) -> Step:
    """Return changes: every third person gets a new address, every seventh a new name, every eleventh is deleted."""
    records, left = [], []
    for person in before.people:
        now = person
        if person.number % 3 == round_ % 3:
            now = replace(now, mail=f"{person.uid}.{round_}@example.org")
            records.append(f"dn: {now.dn}\nchangetype: modify\nreplace: mail\nmail: {now.mail}\n-\n")
        if person.number % 7 == round_ % 7:
            renamed = replace(now, uid=f"{now.uid}-{round_}")
            records.append(f"dn: {now.dn}\nchangetype: modrdn\nnewrdn: uid={renamed.uid}\ndeleteoldrdn: 1\n")
            now = renamed
        if person.number % 11 == round_ % 11:
            records.append(f"dn: {now.dn}\nchangetype: delete\n")
        else:
            left.append(now)
    return Step("\n".join(records), len(records), len(records), tuple(left))


def _content(person: Person) -> str:
    first, last = _FIRST[person.number % len(_FIRST)], _LAST[person.number // len(_FIRST) % len(_LAST)]
    return (
        f"dn: {person.dn}\nobjectClass: inetOrgPerson\nuid: {person.uid}\ncn: {first} {last}\nsn: {last}\n"
        f"givenName: {first}\nmail: {person.mail}\nentryUUID: {person.uuid}\n"
    )


def _group(number: int, people: tuple[Person, ...]) -> str:
    members = "".join(f"member: {person.dn}\n" for person in people if person.number % 10 == number % 10)
    return f"dn: cn=group{number},{_GROUPS}\nobjectClass: groupOfNames\ncn: group{number}\n{members}"
