"""Whether a queue is sealed, or gone, for its migration: then bulk writers wait, as for a server that is away."""

import base64

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.api_request import ask
from purveyor.jetstream.maintenance import (
    ALL_RECORDS,
    RECORDS_STREAM,
    MaintenanceNotice,
    record_subject,
)
from purveyor.model.errors import NotFound, PermissionDenied, UnreadableRecord


def migrating(address: Address, stream: str) -> bool:
    """Return whether a stream is being migrated.

    A client that may not read the record, or does not understand it, takes a stream that refuses for one that is.
    """
    subject = record_subject(stream)
    if subject is None:
        return False
    try:
        notice = _notice(address, subject)
    except (PermissionDenied, UnreadableRecord):
        return True
    return notice is not None and not notice.done


def opens_again(address: Address, stream: str) -> bool:
    """Return whether a stream that was sealed or gone will take messages again, or does so by now."""
    if migrating(address, stream):
        return True
    try:
        return not ask(address, f"STREAM.INFO.{stream}")["config"].get("sealed")
    except NotFound:
        return False


def migrating_subject(address: Address, subject: str) -> bool:
    """Return whether a migration holds back messages on a subject that no stream takes at the moment."""
    try:
        state = ask(address, f"STREAM.INFO.{RECORDS_STREAM}", {"subjects_filter": ALL_RECORDS})["state"]
        return any(_holds_back(address, key, subject) for key in state.get("subjects") or {})
    except (NotFound, PermissionDenied):
        return False


def _holds_back(address: Address, key: str, subject: str) -> bool:
    try:
        notice = _notice(address, key)
    except UnreadableRecord:
        return False
    return notice is not None and notice.holds_back(subject)


def _notice(address: Address, key: str) -> MaintenanceNotice | None:
    try:
        answer = ask(address, f"STREAM.MSG.GET.{RECORDS_STREAM}", {"last_by_subj": key})
    except NotFound:
        return None
    data = base64.b64decode(answer["message"].get("data") or "")
    return MaintenanceNotice.decode(data) if data else None
