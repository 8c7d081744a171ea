"""A stream on disk: the server's own snapshot of it, and what it was when it was taken.

A directory is one archive: `stream.tar.s2` as the server sends it, and `manifest.json`, written last. An archive
without a manifest, or whose data is not what the manifest says, is none: so a crash while it was written leaves nothing
that could be taken for one.
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

from purveyor.jetstream.api import Api
from purveyor.jetstream.api_errors import Subject, translate
from purveyor.jetstream.codec import Json
from purveyor.jetstream.connection import Answer, Subscription
from purveyor.model.errors import DataLost, InvalidInput, NoAnswer, Refused, UnreadableRecord
from purveyor.model.stored_record import VERSION, Kind

_DATA: Final = "stream.tar.s2"
_MANIFEST: Final = "manifest.json"
_CHUNK: Final = 128 << 10
_SILENCE_SECONDS: Final = 10.0
_SLOWEST_BYTES: Final = 2 << 20  # a second: the server reads all of it before it says that it is done
_END: Final = 204
_AHEAD: Final = 8
"""So many chunks are sent before the answer to the first is waited for."""

Told = Callable[[int], None]
MANIFEST: Final = Kind(
    "manifest of a stream's archive", ("stream", "created", "config", "state", "bytes", "sha256", "consumers")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an archive holds."""

    stream: str
    created: str
    config: Json
    state: Json
    bytes: int
    sha256: str
    consumers: Json
    """For each consumer where it was: its acknowledgement floor, and what it had still to deliver or to hear of."""


def archive_name(stream: str, created: str) -> str:
    """The directory of a stream's archive.

    >>> archive_name("stream:incoming", "2026-01-01T00:00:00.5Z")
    'incoming-20260101T0000005Z'
    """
    return f"{stream.partition(':')[2]}-{''.join(letter for letter in created if letter.isalnum())}"


def read_manifest(path: Path) -> Manifest | None:
    """What a complete archive holds; None if there is no complete one.

    UnreadableRecord if a newer program wrote it: it must not be taken for incomplete, and be replaced.
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


async def download(api: Api, stream: str, path: Path, consumers: Json, told: Told) -> Manifest:
    """Take a snapshot of a stream into a directory; an earlier one there is replaced, if it is understood."""
    read_manifest(path)
    await asyncio.to_thread(_clear, path)
    connection = api.connection
    inbox = connection.new_inbox()
    listening = await connection.subscribe(inbox)
    try:
        body = {"deliver_subject": inbox, "no_consumers": False, "chunk_size": _CHUNK, "jsck": True}
        answer = await api.ask(f"STREAM.SNAPSHOT.{stream}", body, about=Subject(stream=stream))
        size, digest = await _receive(api, listening, path / _DATA, told)
    finally:
        await listening.close()
    info = await api.ask(f"STREAM.INFO.{stream}", about=Subject(stream=stream))
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


async def _receive(api: Api, listening: Subscription, file: Path, told: Told) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        while True:
            chunk = await listening.next(_SILENCE_SECONDS)
            if chunk is None:
                raise NoAnswer("the server stopped in the middle of a snapshot", fix="try again")
            if chunk.status == _END:
                break
            if chunk.status:
                raise Refused(f"the snapshot was broken off: {chunk.block.description}", code=chunk.status)
            if not chunk.data:
                break
            out.write(chunk.data)
            digest.update(chunk.data)
            size += len(chunk.data)
            told(size)
            if chunk.reply:
                await api.connection.publish(chunk.reply)
        out.flush()
        os.fsync(out.fileno())
    return size, digest.hexdigest()


async def check(path: Path, manifest: Manifest) -> None:
    """DataLost if the data is not what the manifest says."""

    def digest() -> str:
        with (path / _DATA).open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()

    if await asyncio.to_thread(digest) != manifest.sha256:
        raise DataLost(f"the archive {path} is damaged", fix="bring its files back as they were")


async def upload(api: Api, config: Json, path: Path, manifest: Manifest, told: Told) -> Json:
    """Restore a stream from its archive, with other settings; its state when it was made."""
    about = Subject(stream=manifest.stream)
    state = manifest.state
    answer = await api.ask(f"STREAM.RESTORE.{manifest.stream}", {"config": config, "state": state}, about=about)
    to = answer["deliver_subject"]
    waiting: list[asyncio.Task[Answer]] = []
    sent = 0
    try:
        with (path / _DATA).open("rb") as data:
            while chunk := data.read(_CHUNK):
                waiting.append(asyncio.create_task(api.connection.request(to, chunk, timeout_seconds=_SILENCE_SECONDS)))
                await asyncio.sleep(0)  # chunks go out in the order in which their tasks begin
                sent += len(chunk)
                if len(waiting) >= _AHEAD:
                    _taken(await waiting.pop(0), manifest)
                    told(sent)
        while waiting:
            _taken(await waiting.pop(0), manifest)
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    patience = _SILENCE_SECONDS + manifest.bytes / _SLOWEST_BYTES
    end = _taken(await api.connection.request(to, b"", timeout_seconds=patience), manifest)
    made: Json = json.loads(end.data)
    if "error" in made:
        raise translate(made["error"], about)
    restored: Json = made["state"]
    return restored


def _taken(answer: Answer, manifest: Manifest) -> Answer:
    if answer.status == 503:  # the node that took it in is gone
        raise NoAnswer(f"the restore of stream {manifest.stream!r} was broken off", fix="try again")
    return answer


def remove_others(archives: Path, stream: str, keep: Path) -> None:
    """Remove the archives of earlier migrations of a stream."""
    prefix = archive_name(stream, "")
    for other in archives.glob(f"{prefix}*"):
        try:
            manifest = read_manifest(other)
        except UnreadableRecord:  # it stays
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
