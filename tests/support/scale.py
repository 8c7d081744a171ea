"""How long crash and property tests run: small in `make test`, long in `make chaos`. Every one prints its seed."""

import os
import random
from typing import TypeVar

T = TypeVar("T")

LONG = bool(os.environ.get("PURVEYOR_CHAOS"))


def pick(small: T, long: T) -> T:
    """One of two sizes."""
    return long if LONG else small


def chance(name: str) -> random.Random:
    """A source of randomness whose seed is printed; PURVEYOR_SEED repeats a run."""
    seed = int(os.environ.get("PURVEYOR_SEED") or random.SystemRandom().randrange(2**32))
    print(f"{name}: PURVEYOR_SEED={seed}")
    return random.Random(seed)
