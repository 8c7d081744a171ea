"""The rule for everything that Purveyor stores: a record says its version, and a reader that does not know it stops.

- A record has a field `version`, a whole number. A record without one has version 1.
- A program reads the version and the fields that it knows. A record with another version, or with a field that the
  program does not know, is an `UnreadableRecord`, and so is one that is damaged.
- A program never writes over a record that it does not understand, never skips it and never deletes it. It stops the
  one thing that the record is about, says so, and goes on with all others. When a program that understands the record
  reads it, that thing goes on where it stopped.

A program that uses only some fields of a record checks the version alone (`check_version`): in one version these fields
have one meaning. So does a reader of headers, which whoever passes a message on may add to.

See docs/decisions/0022-stored-records-carry-a-version.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput, UnreadableRecord
from purveyor.model.json_fields import Json

VERSION: Final = "version"
UPGRADE: Final = "upgrade this program: a newer one wrote the record, or it is damaged"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of stored record: its name for people, the fields it may have, and the version that is read and written.

    >>> kind = Kind("shopping list", ("items",))
    >>> kind.dump({"items": 3})
    b'{"version":1,"items":3}'
    >>> kind.read(b'{"items":3}', lambda given: given["items"])
    3
    """

    what: str
    fields: tuple[str, ...] = ()
    version: int = 1

    def dump(self, fields: Json) -> bytes:
        """Encode the record with its version."""
        return json_fields.dump({VERSION: self.version, **fields})

    def read(self, data: bytes | str, build: Callable[[Json], T], of: str = "") -> T:
        """Build a record from its bytes; `UnreadableRecord` if that fails. `of` says whose it is, for the message."""
        whose = f"{of}: " if of else ""
        try:
            return build(json_fields.parse(data, self.what))
        except UnreadableRecord as error:
            raise UnreadableRecord(f"{whose}{error.message}", fix=error.fix) from error
        except InvalidInput as error:
            raise UnreadableRecord(f"{whose}the {self.what} cannot be read: {error.message}", fix=UPGRADE) from error

    def check(self, data: object) -> Json:
        """Return the fields; `UnreadableRecord` if the version or one of the fields is not known."""
        given = json_fields.mapping(data, self.what)
        self.check_version(given)
        for name in given:
            if name not in self.fields and name != VERSION:
                raise UnreadableRecord(
                    f"the {self.what} has the field {name!r}, which this program does not know", fix=UPGRADE
                )
        return given

    def check_version(self, given: Json) -> None:
        """Raise `UnreadableRecord` if the version is not known. For a reader of some fields."""
        version = given.get(VERSION, 1)
        if version != self.version or isinstance(version, bool):
            raise UnreadableRecord(
                f"the {self.what} has version {version!r}, and this program understands version {self.version}",
                fix=UPGRADE,
            )
