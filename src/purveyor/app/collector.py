"""How often a process that serves looks for garbage: rarely, and not at what it imported."""

import gc
from typing import Final

_NEW_OBJECTS: Final = 20_000
"""So many more objects than before are there when the collector looks at the young ones: some requests' worth."""


def spare_imports() -> None:
    """What was imported stays as long as the process: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
