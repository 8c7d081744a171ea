"""The length of crash and property tests: short in `make test`, long in `make chaos`. Each prints its seed."""

import os
import random
from typing import TypeVar

T = TypeVar("T")

LONG = bool(os.environ.get("PURVEYOR_CHAOS"))


def pick(small: T, long: T) -> T:
    """Choose the size for `make test` or for `make chaos`."""
    return long if LONG else small


def chance(name: str) -> random.Random:
    """Return a random generator and print its seed; PURVEYOR_SEED repeats a run."""
    seed = int(os.environ.get("PURVEYOR_SEED") or random.SystemRandom().randrange(2**32))
    print(f"{name}: PURVEYOR_SEED={seed}")
    return random.Random(seed)
