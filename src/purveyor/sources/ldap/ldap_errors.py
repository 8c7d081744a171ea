"""The result codes of LDAP, and their errors of two types: the source tries again, or a person must change something.

DirectoryUnavailable      retryable: busy, unavailable, connection lost, notice of disconnection, silence
└── FollowEnded           the server ended a synchronisation that should go on
DirectoryRefused          a person must act
├── CredentialsRefused    wrong bind DN or password
├── EncryptionRequired    the server wants TLS or a stronger bind
├── CertificateRefused    TLS failed: another authority, another name, or no TLS on that port
├── NoSuchBase            no such entry, or the account may not see it
├── ReferralRefused       another server has the entries
├── LimitExceeded         size, time or administrative limit of the account
├── SyncNotSupported      the server has no overlay `syncprov`
└── NotUnderstood         the bytes are not LDAP, or break its rules
"""

from enum import IntEnum
from typing import Final

from purveyor.model.errors import Refused, Unavailable
from purveyor.sources.ldap.ldap_messages import LdapResult


class ResultCode(IntEnum):
    """A result code that has a name (RFC 4511, A.2; RFC 4533; RFC 4528; RFC 3909). A server may send others."""

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

_EXPLANATIONS: Final = {
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
    return _EXPLANATIONS.get(code, name_result(code))  # type: ignore[call-overload,no-any-return]  # an IntEnum equals its int


SYNCPROV_FIX = "load the overlay `syncprov` on that database of the server (olcOverlay: syncprov), or ask its operator"


class DirectoryUnavailable(Unavailable):
    """The directory cannot answer now. `code` is the result code of LDAP, if the server sent one."""

    def __init__(self, message: str, *, fix: str | None = None, code: int | None = None) -> None:
        super().__init__(message, fix=fix)
        self.code = code


class FollowEnded(DirectoryUnavailable):
    """The server ended a synchronisation in its persist stage without an error."""


class DirectoryRefused(Refused):
    """The directory refuses the request. `code` is the result code of LDAP, or 0."""


class CredentialsRefused(DirectoryRefused):
    """The server does not accept the bind DN and password."""


class EncryptionRequired(DirectoryRefused):
    """The server requires TLS or a stronger authentication."""


class CertificateRefused(DirectoryRefused):
    """TLS could not be set up."""


class NoSuchBase(DirectoryRefused):
    """The base does not exist, or the account may not see it."""


class ReferralRefused(DirectoryRefused):
    """Another server has the entries. `uris` are the places that the referral names."""

    uris: tuple[str, ...] = ()


class LimitExceeded(DirectoryRefused):
    """The server cut off the answer at a limit of the account."""


class SyncNotSupported(DirectoryRefused):
    """The server does not know content synchronisation (RFC 4533) for this base."""


class NotUnderstood(DirectoryRefused):
    """The server sent something that is not LDAP or breaks its rules."""


def refuse_referral(doing: str, uris: tuple[str, ...]) -> ReferralRefused:
    """Return the error for a referral, which names where it points."""
    places = ", ".join(uris) or "another server"
    error = ReferralRefused(
        f"{doing}: the server refers to {places}; Purveyor does not follow referrals",
        fix="configure that server as a source of its own, or correct the base",
        code=ResultCode.REFERRAL,
    )
    error.uris = uris
    return error


def translate_result(result: LdapResult, doing: str) -> DirectoryUnavailable | DirectoryRefused:
    """Return the error for a result other than success. `doing` names the operation and its object."""
    code = result.code
    if code == ResultCode.REFERRAL:
        return refuse_referral(doing, result.referral)
    said = f", the server says {result.text!r}" if result.text else ""
    message = f"{doing}: {explain_result(code)}{said}"
    if not message.endswith(name_result(code)):
        message += f" [{name_result(code)}]"
    if code in RETRYABLE:
        return DirectoryUnavailable(message, code=code)
    kind, fix = _KINDS.get(code, (DirectoryRefused, None))
    if kind is NoSuchBase and result.matched_dn:
        message += f"; the nearest entry that exists is {result.matched_dn}"
    return kind(message, fix=fix, code=code)


_LIMITS_FIX = "give the account `limits` without size and time limits in the server's configuration"
_KINDS: dict[int, tuple[type[DirectoryRefused], str | None]] = {
    ResultCode.INVALID_CREDENTIALS: (CredentialsRefused, "check the bind DN and the password"),
    ResultCode.INAPPROPRIATE_AUTHENTICATION: (CredentialsRefused, "check the bind DN and the password"),
    ResultCode.INVALID_DN_SYNTAX: (DirectoryRefused, "check the spelling of the bind DN and the base"),
    ResultCode.STRONGER_AUTH_REQUIRED: (EncryptionRequired, "use ldaps:// or StartTLS"),
    ResultCode.CONFIDENTIALITY_REQUIRED: (EncryptionRequired, "use ldaps:// or StartTLS"),
    ResultCode.NO_SUCH_OBJECT: (NoSuchBase, "check the base, and that the account may read it"),
    ResultCode.INSUFFICIENT_ACCESS_RIGHTS: (
        DirectoryRefused,
        "give the account the right to read there, or set a bind DN if there is none",
    ),
    ResultCode.SIZE_LIMIT_EXCEEDED: (LimitExceeded, _LIMITS_FIX),
    ResultCode.TIME_LIMIT_EXCEEDED: (LimitExceeded, _LIMITS_FIX),
    ResultCode.ADMIN_LIMIT_EXCEEDED: (LimitExceeded, _LIMITS_FIX),
    ResultCode.UNAVAILABLE_CRITICAL_EXTENSION: (SyncNotSupported, SYNCPROV_FIX),
}
