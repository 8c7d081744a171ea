"""The error tree. Errors of NATS, Spark, a database or the system are translated into it at their boundary.

    PurveyorError
    ├── InvalidInput            a mistake of the caller, found before anything was sent
    │   ├── InvalidName
    │   ├── InvalidSubject
    │   ├── InvalidHeader
    │   ├── SchemaMismatch
    │   └── InvalidConfig
    ├── NotFound
    │   ├── UnknownStream
    │   ├── UnknownConsumer
    │   ├── UnknownMessage
    │   ├── UnknownKey
    │   ├── UnknownTopic
    │   ├── UnknownSchema
    │   └── UnknownSubscription
    ├── Refused                 the server understood and said no
    │   ├── PublishRefused
    │   ├── ConfigRefused
    │   ├── AlreadyExists
    │   ├── WrongRevision
    │   ├── Incompatible
    │   ├── LeaseLost
    │   ├── PrefillFailed
    │   └── PermissionDenied
    ├── OutcomeUnknown          sent, and it is unknown whether it was stored
    ├── MigrationNeeded         a queue exists in a shape that cannot be updated in place
    ├── UnreadableRecord        a stored record that this program does not understand, and does not change
    ├── DataLost                asked for messages that limits or a purge removed
    │   └── PlanOutdated        retryable: asked for them too late; a new plan finds them
    ├── Unavailable             retryable: the same call may succeed later
    │   ├── ServerUnavailable
    │   ├── NoAnswer
    │   ├── WindowFull
    │   └── QueueMigrating
    └── SetupError              this machine or this server cannot be used as it is
        ├── AuthenticationFailed
        ├── MissingExtra        also an ImportError
        ├── ServerTooOld
        ├── ServerMissing
        ├── ServerFailed
        └── StoreInUse

The type of an error decides whether to try again (`retryable`), never its text.
"""

from typing import ClassVar, Final

_MAX_DESCRIPTION_CHARACTERS: Final = 500


class PurveyorError(Exception):
    """The root: the message says what happened to which thing, `fix` says what to do about it."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} ({self.fix})" if self.fix else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword arguments do not pickle by default; Spark executors send ours to the driver.
        return _revive, (type(self), self.args, dict(self.__dict__))


def describe(error: BaseException) -> str:
    """Describe any exception in one line of at most 500 characters.

    >>> describe(ValueError("no number")), describe(KeyError())
    ('ValueError: no number', 'KeyError')
    """
    text = " ".join(str(error).split())[:_MAX_DESCRIPTION_CHARACTERS]
    if isinstance(error, PurveyorError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _revive(kind: type[PurveyorError], args: tuple[object, ...], state: dict[str, object]) -> PurveyorError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidInput(PurveyorError):
    """The input of the caller is wrong; nothing was sent."""


class InvalidName(InvalidInput):
    """An invalid name of a queue, stream, consumer, bucket or key."""


class InvalidSubject(InvalidInput):
    """A subject with empty tokens, white space, or forbidden wildcards."""


class InvalidHeader(InvalidInput):
    """A header name or value that the protocol cannot carry."""


class SchemaMismatch(InvalidInput):
    """An event that does not fit the schema of its topic. `mistakes` are paths in it, and what is wrong there."""

    def __init__(self, message: str, *, fix: str | None = None, mistakes: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message, fix=fix)
        self.mistakes = mistakes


class InvalidConfig(InvalidInput):
    """A setting, or a combination of settings, that makes no sense."""


class NotFound(PurveyorError):
    """The named thing does not exist."""


class UnknownStream(NotFound):
    """No stream of that name, or none that takes that subject."""


class UnknownConsumer(NotFound):
    """No consumer of that name on that stream."""


class UnknownMessage(NotFound):
    """No message at that sequence or subject."""


class UnknownKey(NotFound):
    """No such key in the bucket, or it was deleted."""


class UnknownTopic(NotFound):
    """No topic of that name was declared or seen."""


class UnknownSchema(NotFound):
    """No schema of that name, or it has no such revision."""


class UnknownSubscription(NotFound):
    """No subscription of that name, or it is being deleted."""


class Refused(PurveyorError):
    """The server refused. `code` is its status, `err_code` its exact reason (10000 and up)."""

    def __init__(self, message: str, *, fix: str | None = None, code: int = 0, err_code: int = 0) -> None:
        super().__init__(message, fix=fix)
        self.code = code
        self.err_code = err_code


class PublishRefused(Refused):
    """A message was not stored: too large, stream full or sealed, wrong expectation, ...

    After a bulk publish `index` is the first refused message, `stored` the number of others that were stored.
    """

    index: int | None = None
    stored: int = 0


class ConfigRefused(Refused):
    """The server does not accept this configuration of a stream or consumer."""


class AlreadyExists(Refused):
    """The thing to be created already exists, with other settings or another value."""


class WrongRevision(Refused):
    """A compare-and-set failed: another writer was quicker."""


class Incompatible(Refused):
    """A revision of a schema that is not compatible with the last one."""


class LeaseLost(Refused):
    """The caller does not hold the lease, or no longer holds it."""


class PrefillFailed(Refused):
    """Nothing is delivered, because the prefill failed."""


class PermissionDenied(Refused):
    """The credentials do not allow this subject."""


class OutcomeUnknown(PurveyorError):
    """A connection was lost for longer than the server recognises duplicates: a retry could store a message twice."""


class MigrationNeeded(PurveyorError):
    """A queue exists with settings that only a migration can change."""


class UnreadableRecord(PurveyorError):
    """A stored record has a version or a field that this program does not know, or is damaged.

    It is never overwritten. What it describes stops until a program that understands it reads it (`json_fields.Kind`).
    """


class DataLost(PurveyorError):
    """Limits or a purge removed the requested messages."""


class PlanOutdated(DataLost):
    """The messages of a batch have moved between its plan and its read."""

    retryable = True


class Unavailable(PurveyorError):
    """Nothing is wrong with the request; try again later."""

    retryable = True


class ServerUnavailable(Unavailable):
    """No server could be reached within the time limit of the caller."""


class NoAnswer(Unavailable):
    """Connected, but no answer arrived in time."""


class WindowFull(Unavailable):
    """A subscription has the largest number of leased and delayed messages: no more are delivered."""


class QueueMigrating(Unavailable):
    """A queue is sealed for migration, and accepts no messages until that is over."""


class SetupError(PurveyorError):
    """This machine or server cannot be used as it is set up."""


class AuthenticationFailed(SetupError):
    """The server does not accept these credentials."""


class MissingExtra(SetupError, ImportError):
    """A third-party package is missing that an extra of Purveyor brings."""


class ServerTooOld(SetupError):
    """The server lacks features that Purveyor needs."""


class ServerMissing(SetupError):
    """No nats-server binary, or no server running where one was expected."""


class ServerFailed(SetupError):
    """The nats-server did not start, or dies again and again."""


class StoreInUse(SetupError):
    """Another process owns the store directory."""
