"""The archive of a stream on disk: the snapshot of the server, and a manifest.

A directory is one archive: `stream.tar.s2` as the server sends it, and `manifest.json`, written last. A directory
without a manifest, or whose data does not match the manifest, is no archive: so a crash during the write leaves nothing
that could be mistaken for one.
"""

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from purveyor.jetstream.api import Api, ErrorReply, Json, Resource, to_error
from purveyor.jetstream.connection import NatsSubscription, RawMessage
from purveyor.model.errors import DataLost, InvalidInput, NoAnswer, Refused, UnreadableRecord
from purveyor.model.json_fields import VERSION, Kind

_DATA: Final = "stream.tar.s2"
_MANIFEST: Final = "manifest.json"
_CHUNK_BYTES: Final = 128 << 10
_SILENCE_SECONDS: Final = 10.0
_SLOWEST_BYTES: Final = 2 << 20  # per second: the server reads everything before it answers
_END_STATUS: Final = 204
_CHUNKS_IN_FLIGHT: Final = 8
"""The number of chunks that are sent before the answer to the first is awaited."""

BytesListener = Callable[[int], None]
MANIFEST: Final = Kind(
    "manifest of a stream's archive", ("stream", "created", "config", "state", "bytes", "sha256", "consumers")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of an archive. The field names are those of the stored JSON."""

    stream: str
    created: str
    config: Json
    state: Json
    bytes: int
    sha256: str
    consumers: Json
    """For each consumer its acknowledgement floor, and its numbers of pending and of unacknowledged messages."""


def archive_name(stream: str, created: str) -> str:
    """Return the name of the directory of a stream's archive.

    >>> archive_name("stream:incoming", "2026-01-01T00:00:00.5Z")
    'incoming-20260101T0000005Z'
    """
    return f"{stream.partition(':')[2]}-{''.join(letter for letter in created if letter.isalnum())}"


def read_manifest(path: Path) -> Manifest | None:
    """Read the manifest of a complete archive; None if there is no complete one.

    UnreadableRecord if a newer program wrote it: it must not be mistaken for an incomplete one and be replaced.
    """
    try:
        text, size = (path / _MANIFEST).read_text(), (path / _DATA).stat().st_size
    except OSError:
        return None
    manifest = MANIFEST.read(text, _manifest, str(path))
    return manifest if size == manifest.bytes else None


def _manifest(given: Json) -> Manifest:
    fields = {name: value for name, value in MANIFEST.check(given).items() if name != VERSION}
    try:
        return Manifest(**fields)
    except TypeError as error:
        raise InvalidInput(str(error)) from error


async def download_snapshot(api: Api, stream: str, path: Path, consumers: Json, on_bytes: BytesListener) -> Manifest:
    """Write a snapshot of a stream into a directory; replace an earlier one there, if this program understands it."""
    read_manifest(path)
    await asyncio.to_thread(_clear, path)
    connection = api.connection
    inbox = connection.new_inbox()
    chunks = await connection.subscribe(inbox)
    try:
        body = {"deliver_subject": inbox, "no_consumers": False, "chunk_size": _CHUNK_BYTES, "jsck": True}
        answer = await api.request(f"STREAM.SNAPSHOT.{stream}", body, about=Resource(stream=stream))
        size, digest = await _receive(api, chunks, path / _DATA, on_bytes)
    finally:
        await chunks.close()
    info = await api.request(f"STREAM.INFO.{stream}", about=Resource(stream=stream))
    manifest = Manifest(
        stream=stream,
        created=str(info["created"]),
        config=answer["config"],
        state=answer["state"],
        bytes=size,
        sha256=digest,
        consumers=consumers,
    )
    part = path / f"{_MANIFEST}.part"
    _write(part, MANIFEST.dump(asdict(manifest)))
    part.replace(path / _MANIFEST)
    _sync(path)
    _sync(path.parent)
    return manifest


async def _receive(api: Api, chunks: NatsSubscription, file: Path, on_bytes: BytesListener) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        while True:
            chunk = await chunks.next(_SILENCE_SECONDS)
            if chunk is None:
                raise NoAnswer("the server stopped during a snapshot", fix="try again")
            if chunk.status == _END_STATUS:
                break
            if chunk.status:
                raise Refused(f"the snapshot was interrupted: {chunk.block.description}", code=chunk.status)
            if not chunk.data:
                break
            out.write(chunk.data)
            digest.update(chunk.data)
            size += len(chunk.data)
            on_bytes(size)
            if chunk.reply:
                await api.connection.publish(chunk.reply)
        out.flush()
        os.fsync(out.fileno())
    return size, digest.hexdigest()


async def verify_archive(path: Path, manifest: Manifest) -> None:
    """Raise DataLost if the data does not match the manifest."""

    def digest() -> str:
        with (path / _DATA).open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()

    if await asyncio.to_thread(digest) != manifest.sha256:
        raise DataLost(f"the archive {path} is damaged", fix="restore its files")


async def restore_snapshot(api: Api, config: Json, path: Path, manifest: Manifest, on_bytes: BytesListener) -> Json:
    """Restore a stream from its archive, with other settings; return its state after the restore."""
    about = Resource(stream=manifest.stream)
    state = manifest.state
    answer = await api.request(f"STREAM.RESTORE.{manifest.stream}", {"config": config, "state": state}, about=about)
    to = answer["deliver_subject"]
    waiting: list[asyncio.Task[RawMessage]] = []
    sent = 0
    try:
        with (path / _DATA).open("rb") as data:
            while chunk := data.read(_CHUNK_BYTES):
                waiting.append(asyncio.create_task(api.connection.request(to, chunk, timeout_seconds=_SILENCE_SECONDS)))
                await asyncio.sleep(0)  # chunks are sent in the order in which their tasks begin
                sent += len(chunk)
                if len(waiting) >= _CHUNKS_IN_FLIGHT:
                    _require_accepted(await waiting.pop(0), manifest)
                    on_bytes(sent)
        while waiting:
            _require_accepted(await waiting.pop(0), manifest)
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    timeout_seconds = _SILENCE_SECONDS + manifest.bytes / _SLOWEST_BYTES
    end = _require_accepted(await api.connection.request(to, b"", timeout_seconds=timeout_seconds), manifest)
    made: Json = json.loads(end.data)
    if "error" in made:
        raise to_error(ErrorReply.from_json(made["error"]), about)
    restored: Json = made["state"]
    return restored


def _require_accepted(answer: RawMessage, manifest: Manifest) -> RawMessage:
    if answer.status == 503:  # the node that received it is gone
        raise NoAnswer(f"the restore of stream {manifest.stream!r} was interrupted", fix="try again")
    return answer


def remove_other_archives(archives: Path, stream: str, keep: Path) -> None:
    """Remove all other archives of a stream."""
    prefix = archive_name(stream, "")
    for other in archives.glob(f"{prefix}*"):
        try:
            manifest = read_manifest(other)
        except UnreadableRecord:  # left for a newer program
            continue
        if other != keep and manifest is not None and manifest.stream == stream:
            shutil.rmtree(other)


def _clear(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    (path / _MANIFEST).unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
