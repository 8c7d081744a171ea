"""A small directory for the demo: its entries and changes as LDIF, and what its people look like in the end. Pure.

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
    """An entry. The number stays, whatever else changes."""

    number: int
    uid: str
    mail: str

    @property
    def dn(self) -> str:
        """Where it is."""
        return f"uid={self.uid},{_PEOPLE}"

    @property
    def uuid(self) -> str:
        """Its identity."""
        return f"10000000-0000-4000-8000-{self.number:012d}"


@dataclass(frozen=True, slots=True)
class Step:
    """Some records: their text, how many events they make, how many are about people, and who is there then."""

    ldif: str
    events: int
    about_people: int
    people: tuple[Person, ...]


def beginning(people: int, groups: int) -> Step:
    """Everything that is there at first."""
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
    """What happens to them: every third gets another address, every seventh another name, every eleventh leaves."""
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
