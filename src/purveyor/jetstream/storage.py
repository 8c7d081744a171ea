"""What a message costs on disk: a record around subject, headers and payload. Pure arithmetic."""

_RECORD_LENGTH, _SEQUENCE, _TIME, _SUBJECT_LENGTH, _HASH = 4, 8, 8, 2, 8
_HEADER_LENGTH = 4


def stored_size(subject_bytes: int, data_bytes: int, header_bytes: int = 0) -> int:
    """Bytes that file storage takes for one message; `header_bytes` is the length of the whole header block.

    >>> stored_size(subject_bytes=4, data_bytes=5)  # "hello" on a subject of four characters
    39
    """
    record = _RECORD_LENGTH + _SEQUENCE + _TIME + _SUBJECT_LENGTH + subject_bytes + data_bytes + _HASH
    return record + (_HEADER_LENGTH + header_bytes if header_bytes else 0)


def overhead(subject_bytes: int, header_bytes: int = 0) -> int:
    """What is stored around the payload.

    >>> overhead(subject_bytes=4)
    34
    """
    return stored_size(subject_bytes, 0, header_bytes)
