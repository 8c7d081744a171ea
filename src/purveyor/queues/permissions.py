"""What each part of Purveyor may say and hear on the NATS server: data, and its text for the server's configuration.

A part has a user of its own, with the subjects that its work needs and no others; answers come to an inbox that only
it may listen on. The embedded server makes a user for each of `components`; for a server of your own,
`purveyor queues permissions` prints them.

Two limits are the server's own. Whoever may make a stream decides what it takes in, so `api` and `pipeline`, which make
the queues of subscriptions, are trusted with all of those. And a bucket is read as a whole or not at all: the user of a
subscription can see what others ask for, not what they are sent. It makes neither streams nor consumers.
"""

from typing import Final

from purveyor.jetstream.server.users import Permissions
from purveyor.model.control_events import CONTROL_SUBJECT, JOB_SUBJECT
from purveyor.model.event import LDIF_SUBJECT, SUBJECT
from purveyor.queues.catalogue import (
    DEAD_LETTERS,
    LDIF,
    PREFILL,
    PREFILL_FAILURES,
    Queue,
    incoming,
    internal_queues,
    subscription_queue,
)
from purveyor.queues.dead_letters.letter import token
from purveyor.queues.registry import ACKNOWLEDGED, SUBSCRIPTIONS
from purveyor.queues.status_board import STATUS

IMPORTS: Final = "imports"
"""The bucket that intake keeps its ledger in."""
CREDENTIALS: Final = "credentials"
"""The bucket of passwords and tokens."""

TOPICS: Final = "topics"
"""The bucket of topics and schemas."""
MIGRATIONS: Final = "migrations"
"""The bucket with the state of migrations."""

PUSH_ATTEMPTS: Final = "push-attempts"
"""The bucket of what failed attempts to push a message came to."""

INTAKE: Final = "intake"
PIPELINE: Final = "pipeline"
API: Final = "api"
PUSH: Final = "push"

_API: Final = "$JS.API."
_BUCKETS: Final = (SUBSCRIPTIONS, ACKNOWLEDGED, CREDENTIALS, IMPORTS, MIGRATIONS, STATUS, TOPICS, PUSH_ATTEMPTS)
_LOOKING: Final = (
    f"{_API}STREAM.NAMES",
    *(f"{_API}{question}.KV_{MIGRATIONS}" for question in ("STREAM.INFO", "STREAM.MSG.GET")),
)
"""Why a queue does not answer: nobody made it, or it is being migrated."""
_READING: Final = ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")
_CONSUMING: Final = ("CONSUMER.CREATE", "CONSUMER.INFO", "CONSUMER.DELETE", "CONSUMER.MSG.NEXT")


def components() -> tuple[Permissions, ...]:
    """The users of the parts that every deployment has."""
    return (_intake(), _pipeline(), _api(), _push())


def subscription_user(name: str) -> Permissions:
    """The user of a part that serves one subscription and no other: it reads and empties that queue alone."""
    queue = subscription_queue(name)
    return Permissions(
        user=f"subscription-{name}",
        purpose=f"serves subscription {name}, and no other",
        publish=(
            *_ask(queue.stream, *_READING, "STREAM.MSG.DELETE", "STREAM.PURGE"),
            # Opening a bucket asks the server to make it; it is there, so that changes nothing.
            *_ask(_bucket(SUBSCRIPTIONS), "STREAM.CREATE", "STREAM.MSG.GET"),
            *_ask(_bucket(ACKNOWLEDGED), "STREAM.CREATE", "STREAM.MSG.GET"),
            f"$KV.{ACKNOWLEDGED}.{name}",
            *_ask(DEAD_LETTERS.stream, "STREAM.INFO"),
            f"dead-letters.{token(f'subscription:{name}')}",
        ),
        listen=(f"{name}.main", f"{name}.prefill", f"$KV.{ACKNOWLEDGED}.{name}"),
    )


def _intake() -> Permissions:
    return Permissions(
        user=INTAKE,
        purpose="reads directories into the queue ldif",
        publish=(
            "ldif.>",
            f"dead-letters.{INTAKE}",
            *_ensure(LDIF),
            *_ensure(DEAD_LETTERS),
            *_ask(LDIF.stream, "STREAM.MSG.GET"),
            *_ask(_bucket(IMPORTS), "STREAM.CREATE", "STREAM.MSG.GET"),
            f"$KV.{IMPORTS}.>",
            *_LOOKING,
        ),
    )


def _pipeline() -> Permissions:
    read = tuple(queue.stream for queue in (LDIF, incoming(), PREFILL))
    return Permissions(
        user=PIPELINE,
        purpose="transforms, dispatches, archives and prefills",
        publish=(
            LDIF_SUBJECT,
            JOB_SUBJECT,  # it asks for the catch-up of what it did not understand for a while
            "*.main",
            "*.prefill",
            "dead-letters.>",
            *PREFILL_FAILURES.subjects,
            f"$KV.{SUBSCRIPTIONS}.*.*",
            f"$KV.{ACKNOWLEDGED}.*",
            f"$KV.{STATUS}.>",
            *_LOOKING,
            # Queues of subscriptions have any name; what must not be touched is denied.
            *_ask("*", *_READING, "STREAM.CREATE", "STREAM.DELETE", "STREAM.PURGE"),
            *_ask("*.*", *_CONSUMING),
            *(subject for queue in internal_queues() for subject in _ask(queue.stream, "STREAM.UPDATE")),
            *(subject for stream in read for subject in _ask(f"{stream}.*", "CONSUMER.RESET")),
            *(subject for stream in read for subject in (f"$JS.ACK.{stream}.>", f"$JS.ACK.*.*.{stream}.>")),
            # It migrates queues: the record, the lease, and the deletion that only the lease allows, are keys.
            *_ask("*", "CONSUMER.LIST", "CONSUMER.NAMES"),
            f"$KV.{MIGRATIONS}.>",
        ),
        publish_denied=(
            *_kept_whole(),
            *(subject for name in (CREDENTIALS, IMPORTS) for subject in _closed(_bucket(name))),
        ),
        listen=("$JS.EVENT.ADVISORY.API",),  # when the deletion of a queue that is migrated is through
    )


def _api() -> Permissions:
    unread = tuple(queue.stream for queue in (LDIF, incoming(), PREFILL, PREFILL_FAILURES))
    return Permissions(
        user=API,
        purpose="serves subscriptions and takes events, over HTTP",
        publish=(
            SUBJECT,
            CONTROL_SUBJECT,
            JOB_SUBJECT,
            "dead-letters.>",
            # Where an administrator may put back what was given up.
            "*.retry",
            *LDIF.subjects,
            "stage.>",
            f"$KV.{SUBSCRIPTIONS}.*.*",
            f"$KV.{ACKNOWLEDGED}.*",
            f"$KV.{CREDENTIALS}.*.*",
            f"$KV.{TOPICS}.*.*",
            *_LOOKING,
            *(subject for queue in (incoming(), PREFILL, DEAD_LETTERS) for subject in _ensure(queue)),
            *(
                subject
                for name in (SUBSCRIPTIONS, ACKNOWLEDGED, CREDENTIALS, TOPICS)
                for subject in _ask(f"{_bucket(name)}.*", *_CONSUMING)
            ),
            *_ask("*", *_READING, "STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE"),
            *_ask("*", "STREAM.MSG.DELETE"),
            # How full every queue is, and how far its readers are: what the console shows.
            f"{_API}STREAM.LIST",
            *_ask("*", "CONSUMER.LIST"),
        ),
        publish_denied=(
            *_kept_whole(),
            *(subject for stream in unread for subject in _ask(stream, "STREAM.MSG.GET", "DIRECT.GET")),
            *(subject for stream in unread for subject in _ask(stream, "STREAM.MSG.DELETE")),
            *_closed(_bucket(IMPORTS)),
        ),
        # It waits for messages of any subscription. Not `*.*`: the server takes `$JS.>` for one of those.
        listen=("*.main", "*.prefill", f"$KV.{ACKNOWLEDGED}.*"),
    )


def _push() -> Permissions:
    unread = tuple(queue.stream for queue in internal_queues() if queue.stream != DEAD_LETTERS.stream)
    return Permissions(
        user=PUSH,
        purpose="pushes the messages of subscriptions to their endpoints",
        publish=(
            f"$KV.{SUBSCRIPTIONS}.*.definition",  # it pauses one whose endpoint is gone
            f"$KV.{ACKNOWLEDGED}.*",
            f"$KV.{PUSH_ATTEMPTS}.*.*",
            "dead-letters.>",
            *_LOOKING,
            *_ensure(DEAD_LETTERS),
            *(subject for name in (SUBSCRIPTIONS, ACKNOWLEDGED, PUSH_ATTEMPTS) for subject in _bucket_user(name)),
            *_ask(f"{_bucket(SUBSCRIPTIONS)}.*", *_CONSUMING),
            *_ask("*", *_READING, "STREAM.PURGE", "STREAM.MSG.DELETE"),
        ),
        publish_denied=(
            *_kept_whole(),
            *(subject for stream in unread for subject in _ask(stream, "STREAM.MSG.GET", "DIRECT.GET")),
            *(subject for stream in unread for subject in _ask(stream, "STREAM.MSG.DELETE")),
            *(subject for name in (CREDENTIALS, IMPORTS, TOPICS) for subject in _closed(_bucket(name))),
        ),
        listen=("*.main", "*.prefill", f"$KV.{ACKNOWLEDGED}.*"),
    )


def _bucket_user(name: str) -> tuple[str, ...]:
    """What opening and reading a bucket takes."""
    return _ask(_bucket(name), "STREAM.CREATE", "STREAM.INFO", "STREAM.MSG.GET")


def _ask(tail: str, *questions: str) -> tuple[str, ...]:
    return tuple(f"{_API}{question}.{tail}" for question in questions)


def _ensure(queue: Queue) -> tuple[str, ...]:
    """What `ensure` asks: both sides of a queue bring it to its declaration."""
    readers = (
        subject
        for reader in queue.readers
        for subject in _ask(f"{queue.stream}.{reader.durable}", "CONSUMER.INFO", "CONSUMER.CREATE")
    )
    return (*_ask(queue.stream, "STREAM.INFO", "STREAM.CREATE", "STREAM.UPDATE"), *readers)


def _kept_whole() -> tuple[str, ...]:
    """Nobody but an operator removes or empties what all share."""
    streams = (*(queue.stream for queue in internal_queues()), *map(_bucket, _BUCKETS))
    return tuple(subject for stream in streams for subject in _ask(stream, "STREAM.DELETE", "STREAM.PURGE"))


def _closed(stream: str) -> tuple[str, ...]:
    """Neither made nor read nor consumed."""
    return (
        *_ask(stream, *_READING, "STREAM.CREATE", "STREAM.MSG.DELETE"),
        *_ask(f"{stream}.*", *_CONSUMING),
    )


def _bucket(name: str) -> str:
    return f"KV_{name}"
