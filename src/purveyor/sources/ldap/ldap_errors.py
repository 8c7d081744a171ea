"""The errors of a directory, as two types: the source tries again, or a person must change something.

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

from purveyor.model.errors import Refused, Unavailable
from purveyor.sources.ldap.ldap_messages import LdapResult
from purveyor.sources.ldap.result_codes import RETRYABLE, ResultCode, explain_result, name_result

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
