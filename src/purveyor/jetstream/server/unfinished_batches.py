"""Unfinished atomic batches in the store of a server that died: dropped where the server would lose their messages.

A server without a cluster stages an atomic batch in files, and stores its messages one by one when it is committed. If
it dies in between, it stores the rest when it starts again (seen with 2.15.1): before it has restored the consumers of
the stream. An interest stream keeps no message that no consumer wants, so the rest is gone, and its message ids are
remembered: a publisher that sends the batch again is told that all of it is stored.

Without the staged files the server leaves the batch as it is. Nobody was told that it is stored, so its publisher
sends it again: the server recognises the messages that it has, and stores the rest.
"""

import json
import logging
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)


def drop_unfinished_batches(store: Path) -> None:
    """Remove the staged batches of interest streams, before the server of this store is started."""
    for batches in store.glob("*/streams/*/batches"):
        left = list(batches.iterdir())
        if left and _keeps_by_interest(batches.parent / "meta.inf"):
            logger.info("dropped %d unfinished batches of %s: their publishers send them again", len(left), batches)
            for each in left:
                shutil.rmtree(each)


def _keeps_by_interest(config: Path) -> bool:
    try:
        return bool(json.loads(config.read_bytes())["retention"] == "interest")
    except (OSError, ValueError, KeyError, TypeError):  # a stream in the making: the server deals with it
        return False


__all__ = ["drop_unfinished_batches"]
