"""The result codes of LDAP (RFC 4511, A.2; RFC 4533; RFC 4528; RFC 3909), and what they mean in plain words."""

from enum import IntEnum
from typing import Final


class ResultCode(IntEnum):
    """A result code that has a name. A server may send others."""

    SUCCESS = 0
    OPERATIONS_ERROR = 1
    PROTOCOL_ERROR = 2
    TIME_LIMIT_EXCEEDED = 3
    SIZE_LIMIT_EXCEEDED = 4
    COMPARE_FALSE = 5
    COMPARE_TRUE = 6
    AUTH_METHOD_NOT_SUPPORTED = 7
    STRONGER_AUTH_REQUIRED = 8
    REFERRAL = 10
    ADMIN_LIMIT_EXCEEDED = 11
    UNAVAILABLE_CRITICAL_EXTENSION = 12
    CONFIDENTIALITY_REQUIRED = 13
    SASL_BIND_IN_PROGRESS = 14
    NO_SUCH_ATTRIBUTE = 16
    UNDEFINED_ATTRIBUTE_TYPE = 17
    INAPPROPRIATE_MATCHING = 18
    CONSTRAINT_VIOLATION = 19
    ATTRIBUTE_OR_VALUE_EXISTS = 20
    INVALID_ATTRIBUTE_SYNTAX = 21
    NO_SUCH_OBJECT = 32
    ALIAS_PROBLEM = 33
    INVALID_DN_SYNTAX = 34
    ALIAS_DEREFERENCING_PROBLEM = 36
    INAPPROPRIATE_AUTHENTICATION = 48
    INVALID_CREDENTIALS = 49
    INSUFFICIENT_ACCESS_RIGHTS = 50
    BUSY = 51
    UNAVAILABLE = 52
    UNWILLING_TO_PERFORM = 53
    LOOP_DETECT = 54
    NAMING_VIOLATION = 64
    OBJECT_CLASS_VIOLATION = 65
    NOT_ALLOWED_ON_NON_LEAF = 66
    NOT_ALLOWED_ON_RDN = 67
    ENTRY_ALREADY_EXISTS = 68
    OBJECT_CLASS_MODS_PROHIBITED = 69
    AFFECTS_MULTIPLE_DSAS = 71
    OTHER = 80
    CANCELED = 118
    NO_SUCH_OPERATION = 119
    TOO_LATE = 120
    CANNOT_CANCEL = 121
    ASSERTION_FAILED = 122
    AUTHORIZATION_DENIED = 123
    SYNC_REFRESH_REQUIRED = 4096


RETRYABLE: Final = frozenset({ResultCode.BUSY, ResultCode.UNAVAILABLE, ResultCode.CANCELED, ResultCode.TOO_LATE})
"""The codes after which the same request can succeed later."""

_PLAIN: Final = {
    ResultCode.SUCCESS: "success",
    ResultCode.OPERATIONS_ERROR: "the server could not carry out the operation",
    ResultCode.PROTOCOL_ERROR: "the server does not understand the request",
    ResultCode.TIME_LIMIT_EXCEEDED: "the time limit of the account is over",
    ResultCode.SIZE_LIMIT_EXCEEDED: "the account may not read that many entries",
    ResultCode.AUTH_METHOD_NOT_SUPPORTED: "the server does not accept a simple bind",
    ResultCode.STRONGER_AUTH_REQUIRED: "the server requires a stronger authentication or TLS",
    ResultCode.REFERRAL: "another server has these entries",
    ResultCode.ADMIN_LIMIT_EXCEEDED: "a limit of the server is exceeded",
    ResultCode.UNAVAILABLE_CRITICAL_EXTENSION: "the server does not support a required extension",
    ResultCode.CONFIDENTIALITY_REQUIRED: "the server requires TLS",
    ResultCode.NO_SUCH_OBJECT: "no such entry, or the account may not see it",
    ResultCode.INVALID_DN_SYNTAX: "not a valid DN",
    ResultCode.INAPPROPRIATE_AUTHENTICATION: "the account has no password, or may not bind in this way",
    ResultCode.INVALID_CREDENTIALS: "wrong bind DN or password",
    ResultCode.INSUFFICIENT_ACCESS_RIGHTS: "the account has no right to do that",
    ResultCode.BUSY: "the server is busy",
    ResultCode.UNAVAILABLE: "the server is shutting down, or is not available",
    ResultCode.UNWILLING_TO_PERFORM: "the server refuses the request",
    ResultCode.OTHER: "an error inside the server",
    ResultCode.CANCELED: "the operation was cancelled",
    ResultCode.SYNC_REFRESH_REQUIRED: "the cookie is too old: the content must be read again",
}


def name_result(code: int) -> str:
    """Return the name of a code as the RFCs spell it, with its number.

    >>> name_result(4), name_result(4096), name_result(9999)
    ('sizeLimitExceeded (4)', 'e-syncRefreshRequired (4096)', 'result code 9999')
    """
    try:
        known = ResultCode(code)
    except ValueError:
        return f"result code {code}"
    if known is ResultCode.SYNC_REFRESH_REQUIRED:
        return "e-syncRefreshRequired (4096)"
    first, *others = known.name.lower().split("_")
    return f"{first}{''.join(word.capitalize() for word in others)} ({code})".replace("Dsas", "DSAs").replace(
        "Dn", "DN"
    )


def explain_result(code: int) -> str:
    """Return what a code means in plain words, else its name.

    >>> explain_result(49), explain_result(64)
    ('wrong bind DN or password', 'namingViolation (64)')
    """
    return _PLAIN.get(code, name_result(code))  # type: ignore[call-overload,no-any-return]  # an IntEnum equals its int
