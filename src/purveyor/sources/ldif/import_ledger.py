"""What was imported before: for each block of a chain the records that are safely in their queue, in a bucket.

The server recognises a repeated id for some minutes only; this ledger remembers for ever. It takes about nine bytes a
record in the bucket `imports`. What a crash before a block is noted means is told in `store`.
"""

from collections.abc import Sequence

from purveyor.jetstream.key_value import Bucket, BucketConfig
from purveyor.model.errors import AlreadyExists, UnknownKey, WrongRevision
from purveyor.queues.client import Queues
from purveyor.sources.ldif.record_ids import (
    BLOCK,
    Block,
    Link,
    join_notes,
    known_count,
    note_of,
    split_notes,
)

BUCKET = "imports"
_MOST_NOTES = 16 * BLOCK
"""In one block: of so many inputs that began alike and then differed are all records known."""


class Ledger:
    """The bucket, as an import uses it."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    @classmethod
    async def open(cls, queues: Queues, *, replicas: int) -> "Ledger":
        """The ledger of a deployment, made if it is not there."""
        return cls(await queues.bucket(BucketConfig(name=BUCKET, replicas=replicas)))

    async def known(self, block: Block) -> int:
        """How many records of a block, from its first on, were imported before."""
        notes, _ = await self._read(block.key)
        return known_count(block.ids, notes)

    async def note(self, block: Block, links: Sequence[Link]) -> None:
        """These records of a block are in their queue. Others may note theirs at the same time."""
        while True:
            notes, revision = await self._read(block.key)
            value = join_notes(notes, (note_of(link.id) for link in links), most=_MOST_NOTES)
            try:
                if revision is None:
                    await self._bucket.create(block.key, value)
                else:
                    await self._bucket.update(block.key, value, revision)
            except (AlreadyExists, WrongRevision):
                continue
            return

    async def _read(self, key: str) -> tuple[list[bytes], int | None]:
        try:
            entry = await self._bucket.get(key)
        except UnknownKey:
            return [], None
        return split_notes(entry.value), entry.revision
