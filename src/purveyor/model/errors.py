"""The one error tree. Errors of NATS, Spark, a database or the system are translated into it at their boundary.

    PurveyorError
    ├── InvalidInput            the caller's mistake, found before anything was sent
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
    ├── OutcomeUnknown          sent, and no longer possible to tell whether it was stored
    ├── MigrationNeeded         a queue exists in a shape that cannot be updated in place
    ├── UnreadableRecord        a stored record that this program does not understand, and leaves as it is
    ├── DataLost                asked for messages that limits or a purge removed
    │   └── PlanOutdated        retryable: asked for them too late, planned again it finds where they went
    ├── Unavailable             retryable: the same call may succeed later
    │   ├── ServerUnavailable
    │   ├── NoAnswer
    │   ├── WindowFull
    │   └── QueueMigrating
    └── SetupError              this machine or this server cannot be used as it is
        ├── AuthenticationFailed
        ├── ServerTooOld
        ├── ServerMissing
        ├── ServerFailed
        └── StoreInUse

Whether to try again is a matter of type (`retryable`), never of text.
"""

from typing import ClassVar, Final

_LONGEST_DESCRIPTION: Final = 500


class PurveyorError(Exception):
    """The root: says what happened and to which thing, and in `fix` what to do about it."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} ({self.fix})" if self.fix else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword arguments do not pickle by themselves; ours cross process borders (executors).
        return _revive, (type(self), self.args, dict(self.__dict__))


def describe(error: BaseException) -> str:
    """Describe any exception in one line of at most 500 characters.

    >>> describe(ValueError("no number")), describe(KeyError())
    ('ValueError: no number', 'KeyError')
    """
    text = " ".join(str(error).split())[:_LONGEST_DESCRIPTION]
    if isinstance(error, PurveyorError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _revive(kind: type[PurveyorError], args: tuple[object, ...], state: dict[str, object]) -> PurveyorError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidInput(PurveyorError):
    """What the caller gave cannot be right; nothing was sent."""


class InvalidName(InvalidInput):
    """A name of a queue, stream, consumer, bucket or key that cannot be one."""


class InvalidSubject(InvalidInput):
    """A subject with empty tokens, white space, or wildcards where none may be."""


class InvalidHeader(InvalidInput):
    """A header name or value that the protocol cannot carry."""


class SchemaMismatch(InvalidInput):
    """An event that does not fit the schema of its topic. `mistakes` are places in it, and what is wrong there."""

    def __init__(self, message: str, *, fix: str | None = None, mistakes: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message, fix=fix)
        self.mistakes = mistakes


class InvalidConfig(InvalidInput):
    """A setting, or a combination of settings, that makes no sense."""


class NotFound(PurveyorError):
    """The thing named does not exist."""


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
    """The server said no. `code` is its status, `err_code` its exact reason (10000 and up)."""

    def __init__(self, message: str, *, fix: str | None = None, code: int = 0, err_code: int = 0) -> None:
        super().__init__(message, fix=fix)
        self.code = code
        self.err_code = err_code


class PublishRefused(Refused):
    """A message was not stored: too large, stream full or sealed, wrong expectation, ...

    After a bulk publish `index` tells the first refused message, `stored` how many others were stored.
    """

    index: int | None = None
    stored: int = 0


class ConfigRefused(Refused):
    """The server does not take this configuration of a stream or consumer."""


class AlreadyExists(Refused):
    """The thing to be created is there already, with other settings or another value."""


class WrongRevision(Refused):
    """A compare-and-set lost: somebody else wrote in between."""


class Incompatible(Refused):
    """A revision of a schema that does not keep what the last one promised."""


class LeaseLost(Refused):
    """A message is not, or no longer, in the hands of the one who says something about it."""


class PrefillFailed(Refused):
    """Nothing is delivered, because what comes first could not be made."""


class PermissionDenied(Refused):
    """The credentials do not allow this subject."""


class OutcomeUnknown(PurveyorError):
    """A connection was lost for longer than duplicates can be recognised: sending again could store a message twice."""


class MigrationNeeded(PurveyorError):
    """A queue exists with settings that only a migration can change."""


class UnreadableRecord(PurveyorError):
    """A stored record has a version or a field that this program does not know, or is damaged.

    Nothing is written over it. What it is about stops until a program reads it that understands it (`model.stored`).
    """


class DataLost(PurveyorError):
    """Messages that were asked for are gone by limits or by a purge."""


class PlanOutdated(DataLost):
    """A batch read ran so long after it was planned that its messages are no longer where they were."""

    retryable = True


class Unavailable(PurveyorError):
    """Nothing is wrong with the request; try again later."""

    retryable = True


class ServerUnavailable(Unavailable):
    """No server could be reached within the patience of the caller."""


class NoAnswer(Unavailable):
    """Connected, but nobody answered in time."""


class WindowFull(Unavailable):
    """As much of a subscription is leased or waits for a retry as may be: nothing more is handed out."""


class QueueMigrating(Unavailable):
    """A queue is sealed for its migration, and takes no messages until that is over."""


class SetupError(PurveyorError):
    """This machine or server cannot be used as it is set up."""


class AuthenticationFailed(SetupError):
    """The server does not accept these credentials."""


class ServerTooOld(SetupError):
    """The server lacks what Purveyor stands on."""


class ServerMissing(SetupError):
    """No nats-server binary, or no server running where one was expected."""


class ServerFailed(SetupError):
    """The nats-server did not come up, or keeps dying."""


class StoreInUse(SetupError):
    """Another process owns the store directory."""
