"""Whether a queue is sealed, or gone, for its migration: then bulk writers wait, as for a server that is away."""

import base64

from purveyor.model.errors import InvalidInput, NotFound, PermissionDenied
from purveyor.model.names import subject_matches
from purveyor.queues.address import Address
from purveyor.queues.bulk.ask import ask
from purveyor.queues.catalogue import PREFIX
from purveyor.queues.migration import places
from purveyor.queues.migration.record import Record


def migrating(address: Address, stream: str) -> bool:
    """Whether a stream is being migrated. Who may not ask takes a queue that refuses for one that is."""
    if not stream.startswith(PREFIX):
        return False
    try:
        record = _record(address, places.record_key(stream.removeprefix(PREFIX)))
    except PermissionDenied:
        return True
    return record is not None and not record.done


def opens_again(address: Address, stream: str) -> bool:
    """Whether a stream that refused, because it was sealed or gone, will take messages again, or does so by now."""
    if migrating(address, stream):
        return True
    try:
        return not ask(address, f"STREAM.INFO.{stream}")["config"].get("sealed")
    except NotFound:
        return False


def migrating_subject(address: Address, subject: str) -> bool:
    """The same for a subject that no stream takes at the moment."""
    try:
        state = ask(
            address, f"STREAM.INFO.{places.STREAM}", {"subjects_filter": places.subject(places.record_key("*"))}
        )["state"]
        keys = [name.partition(f"$KV.{places.BUCKET}.")[2] for name in state.get("subjects") or {}]
        records = [_record(address, key) for key in keys]
    except (NotFound, PermissionDenied):
        return False
    return any(
        record is not None and not record.done and any(subject_matches(each, subject) for each in record.subjects)
        for record in records
    )


def _record(address: Address, key: str) -> Record | None:
    try:
        answer = ask(address, f"STREAM.MSG.GET.{places.STREAM}", {"last_by_subj": places.subject(key)})
        return Record.decode(base64.b64decode(answer["message"].get("data") or ""))
    except (NotFound, InvalidInput):
        return None
