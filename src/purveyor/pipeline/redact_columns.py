"""Hidden fields out of the bodies of a portion of rows: for dispatch, catch-up, prefill and replay alike.

One look by RE2 over all bytes tells which rows may have such a field at all; only those are touched, by the model's own
rule. All others keep their bytes, and a portion without any stays the very array that it is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.model.redaction import censor, suspicion


def censored(bodies: Any, hidden: Sequence[str]) -> Any:
    """Bodies of events, as an array of bytes, without the fields that are hidden from one subscription. Pure."""
    if not hidden or not len(bodies):
        return bodies
    suspicious = pc.match_substring_regex(bodies, pattern=suspicion(tuple(hidden)))
    at = np.flatnonzero(suspicious.to_numpy(zero_copy_only=False))
    changed = [censor(body, hidden) for body in bodies.take(pa.array(at)).to_pylist()]
    if not changed:
        return bodies
    return pc.replace_with_mask(bodies, suspicious, pa.array(changed, bodies.type))
