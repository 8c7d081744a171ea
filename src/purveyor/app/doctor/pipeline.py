"""The pipeline's own files: whether its checkpoints belong to the streams that are there, and whether it runs."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from purveyor.app.doctor.findings import Finding, note, ok, warning, wrong
from purveyor.app.settings import Settings
from purveyor.model.errors import DataLost, NotFound, PermissionDenied, PurveyorError
from purveyor.queues.migration.record import CONTINUES

_NEW_START: Final = "bring the store back that belongs to it, or move the checkpoint away to begin anew: see the guide"

Ask = Callable[[str], dict[str, Any]]
"""The server's word on a stream: `STREAM.INFO`."""


def look_at_pipeline(settings: Settings, ask: Ask | None) -> Iterator[Finding]:
    """Without a server only what lies on this machine."""
    directory = settings.data_dir / "checkpoints"
    names = sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
    if not names:
        yield note("checkpoints", "there are none here: the pipeline has not run on this data directory")
    for name in names:
        yield from _checkpoint(directory / name, ask)
    yield from _status(settings.data_dir)


def _checkpoint(path: Path, ask: Ask | None) -> Iterator[Finding]:
    from purveyor.pipeline.archive.checkpoint import committed  # noqa: PLC0415 - it brings Spark
    from purveyor.spark.offsets import StreamView, check_identity, loss, lost_range  # noqa: PLC0415

    try:
        offset = committed(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        yield wrong("checkpoints", f"{path.name} cannot be read: {error!r}", f"see {path}; {_NEW_START}")
        return
    if offset is None or ask is None:
        yield ok("checkpoints", f"{path.name}: {'nothing done yet' if offset is None else f'at {offset.sequence}'}")
        return
    try:
        info = ask(offset.stream)
        state, config = info["state"], info["config"]
        told = str((config.get("metadata") or {}).get(CONTINUES, ""))
        view = StreamView(
            name=offset.stream,
            created=str(info["created"]),
            first=int(state["first_seq"]),
            last=int(state["last_seq"]),
            messages=int(state["messages"]),
            continues=frozenset(told.split()),
        )
        check_identity(offset, view)
        if view.last < offset.sequence:
            text = f"{path.name} is at {offset.sequence}, and stream {view.name} ends at {view.last}: an older store?"
            yield wrong("checkpoints", text, _NEW_START)
            return
        gone = lost_range(offset, view)
        if gone is not None:
            yield warning("checkpoints", f"{path.name}: {loss(view, gone).message}", _NEW_START)
            return
    except DataLost as error:
        yield wrong("checkpoints", f"{path.name}: {error.message}", _NEW_START)
    except NotFound:
        yield wrong("checkpoints", f"{path.name} is at {offset.sequence} of {offset.stream}, which is gone", _NEW_START)
    except PermissionDenied:
        return
    except PurveyorError as error:
        yield note("checkpoints", f"{path.name} cannot be compared: {error.message}", error.fix)
    else:
        yield ok("checkpoints", f"{path.name} is at {offset.sequence} of {view.last} in {offset.stream}")


def _status(data_dir: Path) -> Iterator[Finding]:
    """What a pipeline on this machine said last."""
    for path in sorted(data_dir.glob("pipeline-status*.json")):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            pid, parts = int(told["pid"]), list(told["parts"])
        except (OSError, ValueError, KeyError, TypeError):
            yield warning("pipeline", f"{path.name} cannot be read", "it is written anew while the pipeline runs")
            continue
        if not _lives(pid):
            yield warning("pipeline", f"process {pid} has ended without a word", "start `purveyor serve pipeline`")
            continue
        for part in parts:
            text = f"{part.get('part')} is {part.get('state')}"
            if part.get("error"):
                yield warning("pipeline", f"{text}: {part['error']}", f"see {data_dir / 'logs' / 'pipeline.log'}")
            else:
                yield ok("pipeline", text)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
