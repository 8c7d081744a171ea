"""The pipeline's own files: whether its checkpoints belong to the streams that are there, and whether it runs."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from purveyor.app.doctor.findings import Finding, note, ok, warning, wrong
from purveyor.app.settings import Settings
from purveyor.model.errors import (
    DataLost,
    NotFound,
    PermissionDenied,
    PurveyorError,
    UnknownConsumer,
    UnreadableRecord,
)
from purveyor.queues.migration.record import CONTINUES

if TYPE_CHECKING:
    from purveyor.spark.offsets import StreamView

Ask = Callable[[str], dict[str, Any]]
"""Puts a question to the server's JetStream API, such as `STREAM.INFO.<stream>`."""


def look_at_pipeline(settings: Settings, ask: Ask | None) -> Iterator[Finding]:
    """Look at the files of the pipeline; without a server only at what is on this machine."""
    from purveyor.pipeline.checkpoint_recovery import REPLACED  # noqa: PLC0415 - it brings Spark

    directory = settings.data_dir / "checkpoints"
    found = sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
    names = [name for name in found if REPLACED not in name]
    if not names:
        yield note("checkpoints", "there are none here: the pipeline has not run on this data directory")
    for name in names:
        yield _checkpoint(directory / name, settings.data_dir / "archive", ask)
    yield from _status(settings.data_dir)


def _checkpoint(path: Path, archive: Path, ask: Ask | None) -> Finding:
    """Compare a checkpoint with its stream, by the rule that its part follows when it starts."""
    from purveyor.pipeline import checkpoint_recovery as recovery  # noqa: PLC0415 - it brings Spark
    from purveyor.pipeline.archive.layout import archived_until  # noqa: PLC0415

    try:
        found = recovery.examine(path)
        if found.damage is None and (found.offset is None or ask is None):
            where = "nothing done yet" if found.offset is None else f"at {found.offset.sequence}"
            return ok("checkpoints", f"{path.name}: {where}")
        if ask is None or found.offset is None:
            return warning("checkpoints", f"{path.name}: {found.damage}", "start the pipeline: it repairs it, or stops")
        offset, stream = found.offset, found.offset.stream
        rule: recovery.Rule
        rule, durable = recovery.dispatch_rule, path.name.removeprefix("dispatch-")
        if path.name == "archive":
            rule = recovery.archive_rule(archive, archived_until(archive))
        elif path.name == "transform":
            rule, durable = recovery.transform_rule, "transformer"
        view = _view(stream, ask(f"STREAM.INFO.{stream}"))
        decision = rule(found, view, _floor(ask, f"CONSUMER.INFO.{stream}.{durable}"))
    except NotFound:
        text = f"{path.name} is at {offset.sequence} of {stream}, which is gone"
        return wrong("checkpoints", text, "restore the NATS store and the checkpoints of one moment")
    except PermissionDenied as error:
        return note("checkpoints", f"{path.name} cannot be compared: {error.message}", error.fix)
    except (DataLost, UnreadableRecord) as error:
        return wrong("checkpoints", f"{path.name}: {error.message}", error.fix or "see the guide to operations")
    except PurveyorError as error:
        return note("checkpoints", f"{path.name} cannot be compared: {error.message}", error.fix)
    match decision:
        case recovery.BeginAnew(reason):
            return warning("checkpoints", f"{path.name}: {reason}", "nothing: the part replaces it when it starts")
        case recovery.GoOn(str() as text):
            return warning("checkpoints", f"{path.name}: {text}", "import each directory again")
        case _:
            return ok("checkpoints", f"{path.name} is at {offset.sequence} of {view.last} in {stream}")


def _view(stream: str, info: dict[str, Any]) -> "StreamView":
    from purveyor.spark.offsets import StreamView  # noqa: PLC0415 - it brings Spark

    state, config = info["state"], info["config"]
    return StreamView(
        name=stream,
        created=str(info["created"]),
        first=int(state["first_seq"]),
        last=int(state["last_seq"]),
        messages=int(state["messages"]),
        continues=frozenset(str((config.get("metadata") or {}).get(CONTINUES, "")).split()),
    )


def _floor(ask: Ask, question: str) -> int | None:
    try:
        return int(ask(question)["ack_floor"]["stream_seq"])
    except UnknownConsumer:
        return None


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
