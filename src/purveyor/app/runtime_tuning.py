"""What processes that serve for long have in common: a quick event loop, and little garbage to look for."""

import asyncio
import gc
from collections.abc import Callable
from typing import Final

_NEW_OBJECTS: Final = 20_000
"""So many more objects than before are there when the collector looks at the young ones: some requests' worth."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """For `asyncio.Runner`: uvloop where there is one."""
    try:
        import uvloop  # noqa: PLC0415 - not on every system
    except ImportError:
        return None
    return uvloop.new_event_loop


def spare_imports() -> None:
    """What was imported stays as long as the process: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
