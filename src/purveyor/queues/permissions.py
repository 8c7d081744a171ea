"""The NATS users of the components of Purveyor, and the subjects that each of them may publish and subscribe to.

A component has its own user, with the subjects that it needs and no others; replies arrive at an inbox that only this
user may subscribe to. The embedded server creates the users of `component_users`; for an external server,
`purveyor queues permissions` prints them. An application with stages has the user of `stages_user`.

The server has two limits. A user that may create a stream decides which subjects it takes, so `api` and `pipeline`,
which create the queues of subscriptions, are trusted with all of them. And a user reads a bucket as a whole or not at
all: the user of a subscription can see the definitions of others, not their messages. It creates neither streams nor
consumers.
"""

from typing import Final

from purveyor.jetstream.server.config import Permissions
from purveyor.model.control_events import CONTROL_SUBJECT, JOB_SUBJECT
from purveyor.model.event import LDIF_SUBJECT, OUTBOX_SUBJECT, SUBJECT
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
from purveyor.queues.dead_letters.letter import subject_token
from purveyor.queues.registry import ACKNOWLEDGED, SUBSCRIPTIONS
from purveyor.queues.status_board import STATUS

IMPORTS: Final = "imports"
"""The bucket of the ledgers of imports."""
SOURCES_BUCKET: Final = "sources"
"""The bucket of the states and leases of sources that follow a directory."""
CREDENTIALS: Final = "credentials"
"""The bucket of passwords and tokens."""

TOPICS: Final = "topics"
"""The bucket of topics and schemas."""
MIGRATIONS: Final = "migrations"
"""The bucket of the records of migrations."""

PUSH_ATTEMPTS: Final = "push-attempts"
"""The bucket of failed push attempts."""

SOURCES: Final = "intake"
"""The NATS user of sources (imports, `serve ldap`), and the origin of their dead letters.

Servers, dead letters and the files of operators have this name from earlier versions.
"""
PIPELINE: Final = "pipeline"
API: Final = "api"
PUSH: Final = "push"
STAGES: Final = "stages"

_API: Final = "$JS.API."
_BUCKETS: Final = (
    SUBSCRIPTIONS,
    ACKNOWLEDGED,
    CREDENTIALS,
    IMPORTS,
    MIGRATIONS,
    STATUS,
    TOPICS,
    PUSH_ATTEMPTS,
    SOURCES_BUCKET,
)
_MIGRATION_LOOKUP: Final = (
    f"{_API}STREAM.NAMES",
    *(f"{_API}{request}.KV_{MIGRATIONS}" for request in ("STREAM.INFO", "STREAM.MSG.GET")),
)
"""To find out why a queue does not answer: it does not exist, or is being migrated."""
_READ_REQUESTS: Final = ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")
_CONSUME_REQUESTS: Final = ("CONSUMER.CREATE", "CONSUMER.INFO", "CONSUMER.DELETE", "CONSUMER.MSG.NEXT")


def component_users() -> tuple[Permissions, ...]:
    """Return the users of the components that every deployment has."""
    return (_sources(), _pipeline(), _api(), _push())


def subscription_user(name: str) -> Permissions:
    """Return the user of a component that serves one subscription: it reads and empties only that queue."""
    queue = subscription_queue(name)
    return Permissions(
        user=f"subscription-{name}",
        purpose=f"serves subscription {name}, and no other",
        publish=(
            *_api_subjects(queue.stream, *_READ_REQUESTS, "STREAM.MSG.DELETE", "STREAM.PURGE"),
            # Opening a bucket asks the server to create it; it exists, so nothing changes.
            *_api_subjects(_bucket_stream(SUBSCRIPTIONS), "STREAM.CREATE", "STREAM.MSG.GET"),
            *_api_subjects(_bucket_stream(ACKNOWLEDGED), "STREAM.CREATE", "STREAM.MSG.GET"),
            f"$KV.{ACKNOWLEDGED}.{name}",
            *_api_subjects(DEAD_LETTERS.stream, "STREAM.INFO"),
            f"dead-letters.{subject_token(f'subscription:{name}')}",
        ),
        listen=(f"{name}.main", f"{name}.prefill", f"$KV.{ACKNOWLEDGED}.{name}"),
    )


def stages_user(*subscriptions: str) -> Permissions:
    """Return the user of applications with stages, which may also read these subscriptions.

    The names of their queues are not known here, so it may create any stream, and move any durable but those of the
    pipeline. It reads no internal queue but `incoming`, where the relay looks for the newest event of its outbox.
    """
    readers = incoming().readers
    served = [subscription_user(name) for name in subscriptions]
    closed = (LDIF, PREFILL, PREFILL_FAILURES)
    consumed = tuple(queue.stream for queue in (*closed, incoming()))
    return Permissions(
        user=STAGES,
        purpose="runs transactional stages, which send messages and publish events",
        publish=tuple(
            dict.fromkeys(
                (
                    "stage.>",
                    "stage-replies.>",
                    SUBJECT,
                    f"{OUTBOX_SUBJECT}.*.*",
                    "dead-letters.>",
                    *_MIGRATION_LOOKUP,
                    *_ensure_subjects(incoming()),
                    *_api_subjects("*", *_READ_REQUESTS, "STREAM.CREATE", "STREAM.UPDATE"),
                    *_api_subjects("*.*", "CONSUMER.CREATE", "CONSUMER.INFO", "CONSUMER.MSG.NEXT", "CONSUMER.RESET"),
                    "$JS.ACK.>",
                    *(subject for each in served for subject in each.publish),
                )
            )
        ),
        publish_denied=(
            *_destructive_subjects(),
            *(subject for queue in closed for subject in _access_subjects(queue.stream)),
            *(subject for reader in readers for subject in _api_subjects(f"*.{reader.durable}", "CONSUMER.RESET")),
            *_api_subjects(f"{incoming().stream}.*", "CONSUMER.MSG.NEXT"),
            *(subject for stream in consumed for subject in (f"$JS.ACK.{stream}.>", f"$JS.ACK.*.*.{stream}.>")),
            *(
                subject
                for name in _BUCKETS
                if name not in (MIGRATIONS, SUBSCRIPTIONS, ACKNOWLEDGED)
                for subject in _access_subjects(_bucket_stream(name))
            ),
        ),
        listen=("stage-replies.>", *(subject for each in served for subject in each.listen)),
    )


def _sources() -> Permissions:
    return Permissions(
        user=SOURCES,
        purpose="reads and follows directories into the queue ldif",
        publish=(
            "ldif.>",
            f"dead-letters.{SOURCES}",
            *_ensure_subjects(LDIF),
            *_ensure_subjects(DEAD_LETTERS),
            *_api_subjects(LDIF.stream, "STREAM.MSG.GET"),
            *_api_subjects(_bucket_stream(IMPORTS), "STREAM.CREATE", "STREAM.MSG.GET"),
            f"$KV.{IMPORTS}.>",
            f"$KV.{SOURCES_BUCKET}.>",
            f"$KV.{STATUS}.source.>",
            *_bucket_subjects(SOURCES_BUCKET),
            *_bucket_subjects(STATUS),
            *_api_subjects(f"{_bucket_stream(SOURCES_BUCKET)}.*", *_CONSUME_REQUESTS),
            *_MIGRATION_LOOKUP,
        ),
    )


def _pipeline() -> Permissions:
    read = tuple(queue.stream for queue in (LDIF, incoming(), PREFILL))
    return Permissions(
        user=PIPELINE,
        purpose="transforms, dispatches, archives and prefills",
        publish=(
            LDIF_SUBJECT,
            JOB_SUBJECT,  # it requests the catch-up of subscriptions that it did not understand for a while
            "*.main",
            "*.prefill",
            "dead-letters.>",
            *PREFILL_FAILURES.subjects,
            f"$KV.{SUBSCRIPTIONS}.*.*",
            f"$KV.{ACKNOWLEDGED}.*",
            f"$KV.{STATUS}.>",
            *_MIGRATION_LOOKUP,
            # Queues of subscriptions can have any name; `publish_denied` protects the other streams.
            *_api_subjects("*", *_READ_REQUESTS, "STREAM.CREATE", "STREAM.DELETE", "STREAM.PURGE"),
            *_api_subjects("*.*", *_CONSUME_REQUESTS),
            *(subject for queue in internal_queues() for subject in _api_subjects(queue.stream, "STREAM.UPDATE")),
            *(subject for stream in read for subject in _api_subjects(f"{stream}.*", "CONSUMER.RESET")),
            *(subject for stream in read for subject in (f"$JS.ACK.{stream}.>", f"$JS.ACK.*.*.{stream}.>")),
            # It migrates queues: the record, the lease, and the deletion (which needs the lease) are keys.
            *_api_subjects("*", "CONSUMER.LIST", "CONSUMER.NAMES"),
            f"$KV.{MIGRATIONS}.>",
        ),
        publish_denied=(
            *_destructive_subjects(),
            *(
                subject
                for name in (CREDENTIALS, IMPORTS, SOURCES_BUCKET)
                for subject in _access_subjects(_bucket_stream(name))
            ),
        ),
        listen=(
            "$JS.EVENT.ADVISORY.API",  # reports that the deletion of a migrated stream is complete
            # The next message ends the wait of an idle query.
            *LDIF.subjects,
            *incoming().subjects,
        ),
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
            # The targets of a redrive of dead letters.
            "*.retry",
            *LDIF.subjects,
            "stage.>",
            f"$KV.{SUBSCRIPTIONS}.*.*",
            f"$KV.{ACKNOWLEDGED}.*",
            f"$KV.{CREDENTIALS}.*.*",
            f"$KV.{TOPICS}.*.*",
            *_MIGRATION_LOOKUP,
            *(subject for queue in (incoming(), PREFILL, DEAD_LETTERS) for subject in _ensure_subjects(queue)),
            *(
                subject
                for name in (SUBSCRIPTIONS, ACKNOWLEDGED, CREDENTIALS, TOPICS)
                for subject in _api_subjects(f"{_bucket_stream(name)}.*", *_CONSUME_REQUESTS)
            ),
            *_api_subjects("*", *_READ_REQUESTS, "STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE"),
            *_api_subjects("*", "STREAM.MSG.DELETE"),
            # The console shows the size of every queue and the positions of its readers.
            f"{_API}STREAM.LIST",
            *_api_subjects("*", "CONSUMER.LIST"),
        ),
        publish_denied=(
            *_destructive_subjects(),
            *(subject for stream in unread for subject in _api_subjects(stream, "STREAM.MSG.GET", "DIRECT.GET")),
            *(subject for stream in unread for subject in _api_subjects(stream, "STREAM.MSG.DELETE")),
            *(subject for name in (IMPORTS, SOURCES_BUCKET) for subject in _access_subjects(_bucket_stream(name))),
        ),
        # It waits for messages of any subscription. Not `*.*`, which also matches subjects of `$JS.>`.
        listen=("*.main", "*.prefill", f"$KV.{ACKNOWLEDGED}.*"),
    )


def _push() -> Permissions:
    unread = tuple(queue.stream for queue in internal_queues() if queue.stream != DEAD_LETTERS.stream)
    return Permissions(
        user=PUSH,
        purpose="pushes the messages of subscriptions to their endpoints",
        publish=(
            f"$KV.{SUBSCRIPTIONS}.*.definition",  # it pauses a subscription whose endpoint is gone
            f"$KV.{ACKNOWLEDGED}.*",
            f"$KV.{PUSH_ATTEMPTS}.*.*",
            f"$KV.{STATUS}.push.*",
            "dead-letters.>",
            *_MIGRATION_LOOKUP,
            *_ensure_subjects(DEAD_LETTERS),
            *(
                subject
                for name in (SUBSCRIPTIONS, ACKNOWLEDGED, PUSH_ATTEMPTS, STATUS)
                for subject in _bucket_subjects(name)
            ),
            *_api_subjects(f"{_bucket_stream(SUBSCRIPTIONS)}.*", *_CONSUME_REQUESTS),
            *_api_subjects("*", *_READ_REQUESTS, "STREAM.PURGE", "STREAM.MSG.DELETE"),
        ),
        publish_denied=(
            *_destructive_subjects(),
            *(subject for stream in unread for subject in _api_subjects(stream, "STREAM.MSG.GET", "DIRECT.GET")),
            *(subject for stream in unread for subject in _api_subjects(stream, "STREAM.MSG.DELETE")),
            *(
                subject
                for name in (CREDENTIALS, IMPORTS, SOURCES_BUCKET, TOPICS)
                for subject in _access_subjects(_bucket_stream(name))
            ),
        ),
        listen=("*.main", "*.prefill", f"$KV.{ACKNOWLEDGED}.*"),
    )


def _bucket_subjects(name: str) -> tuple[str, ...]:
    """Return the API subjects for opening and reading a bucket."""
    return _api_subjects(_bucket_stream(name), "STREAM.CREATE", "STREAM.INFO", "STREAM.MSG.GET")


def _api_subjects(tail: str, *requests: str) -> tuple[str, ...]:
    return tuple(f"{_API}{request}.{tail}" for request in requests)


def _ensure_subjects(queue: Queue) -> tuple[str, ...]:
    """Return the API subjects that `ensure` needs."""
    readers = (
        subject
        for reader in queue.readers
        for subject in _api_subjects(f"{queue.stream}.{reader.durable}", "CONSUMER.INFO", "CONSUMER.CREATE")
    )
    return (*_api_subjects(queue.stream, "STREAM.INFO", "STREAM.CREATE", "STREAM.UPDATE"), *readers)


def _destructive_subjects() -> tuple[str, ...]:
    """Return the API subjects that delete or empty shared streams: only an operator may use them."""
    streams = (*(queue.stream for queue in internal_queues()), *map(_bucket_stream, _BUCKETS))
    return tuple(subject for stream in streams for subject in _api_subjects(stream, "STREAM.DELETE", "STREAM.PURGE"))


def _access_subjects(stream: str) -> tuple[str, ...]:
    """Return the API subjects that create, read or consume a stream."""
    return (
        *_api_subjects(stream, *_READ_REQUESTS, "STREAM.CREATE", "STREAM.MSG.DELETE"),
        *_api_subjects(f"{stream}.*", *_CONSUME_REQUESTS),
    )


def _bucket_stream(name: str) -> str:
    return f"KV_{name}"
