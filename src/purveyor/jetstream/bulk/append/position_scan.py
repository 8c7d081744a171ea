"""Looking behind messages that somebody else wrote to a subject, for the newest one of `append_once`.

It happens when a person publishes into a queue by hand, or when a queue is taken over that another system filled.
"""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.append.replies import as_position
from purveyor.jetstream.bulk.append.types import Target
from purveyor.jetstream.bulk.options import ReadOptions
from purveyor.jetstream.bulk.read.read_range import read_range
from purveyor.model.errors import NoAnswer

_FIRST_SPAN: Final = 1000
_GROWTH: Final = 10


def last_position(address: Address, target: Target, sequence: int, patience_seconds: float) -> int | None:
    """The position of the newest message on the target's subject that has one, up to a sequence that is there.

    Read from its end in spans that grow; None if there is none down to the beginning.
    """
    options = ReadOptions(
        subjects=(target.subject,), columns=("sequence", "headers"), patience_seconds=patience_seconds
    )
    header = pa.scalar(target.position_header)
    span = _FIRST_SPAN
    while True:
        first = max(1, sequence - span)
        seen, position = 0, None
        for batch in read_range(address, target.stream, first, sequence, options):
            seen = batch.column("sequence")[-1].as_py()
            for values in reversed(pc.map_lookup(batch.column("headers"), header, "first").drop_null().to_pylist()):
                found = as_position(values[0] if values else None)
                if found is not None:
                    position = found
                    break
        if seen != sequence:
            # Deleted meanwhile, or read from a replica that is behind: then what comes before it may be missing too.
            raise NoAnswer(f"message {sequence} of stream {target.stream!r} cannot be read", fix="try again")
        if position is not None or first == 1:
            return position
        span *= _GROWTH
