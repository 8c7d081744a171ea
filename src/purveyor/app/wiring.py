"""The one place that builds the objects of an API process and passes them to each other.

An API process has one of each: one registration cache, one cache of state writers, one notifier, one reader of registry
snapshots. HTTP routes, the console, the metrics and the expiry of messages share them. `build_api` builds the objects
that live as long as the process. `open_services` builds those that live as long as a connection to the NATS server.
"""

import contextlib
from collections.abc import AsyncIterator
from functools import partial

from purveyor.app.console.console import Console
from purveyor.app.console.console_login import Sessions, admin_login
from purveyor.app.doctor.readiness import Readiness
from purveyor.app.http.application import Api, ApiOptions
from purveyor.app.http.authentication import Authenticator
from purveyor.app.http.context import Services
from purveyor.app.telemetry.queue_metrics import QueueMetrics, RegistrySnapshots
from purveyor.delivery.credentials import Credentials, PasswordHasher
from purveyor.delivery.dead_letters.service import DeadLetters
from purveyor.delivery.expiry import Expiry
from purveyor.delivery.pull import PullService
from purveyor.delivery.state_writer import SharedServices
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.queues.client import Queues
from purveyor.sources.http_events import EventPublisher
from purveyor.sources.schemas.registry import SchemaCache


def build_api(options: ApiOptions) -> Api:
    """Return an API process: its authenticator, its console if the options have one, and how it opens its services."""
    hasher = PasswordHasher()
    api = Api(
        options,
        hasher=hasher,
        authenticator=Authenticator(options.logins, hasher),
        open_services=partial(open_services, hasher=hasher, options=options),
    )
    if options.console is not None:
        sessions = Sessions(options.console.secret, admin_login(options.logins))
        api.console = Console(api, options.console, sessions)
    return api


@contextlib.asynccontextmanager
async def open_services(queues: Queues, *, hasher: PasswordHasher, options: ApiOptions) -> AsyncIterator[Services]:
    """Build the services on a connection, and close them at the end of the block."""
    replicas = options.replicas
    shared = SharedServices.build(queues, replicas=replicas)
    subscriptions = Subscriptions(queues, replicas=replicas)
    pull = PullService(shared)
    registry_snapshots = RegistrySnapshots(queues)
    readiness = Readiness(
        queues, registry_snapshots, group=options.dispatcher_group, archive_seconds=options.archive_seconds
    )
    services = Services(
        queues=queues,
        subscriptions=subscriptions,
        pull=pull,
        registrations=shared.registrations,
        credentials=Credentials(queues, hasher, replicas=replicas),
        expiry=Expiry(subscriptions, pull),
        events=EventPublisher(queues, replicas=replicas),
        dead_letters=DeadLetters(shared),
        schema_cache=SchemaCache(queues, replicas=replicas),
        registry_snapshots=registry_snapshots,
        queue_metrics=QueueMetrics(queues, registry_snapshots),
        readiness=readiness,
    )
    try:
        yield services
    finally:
        await readiness.close()
        await services.schema_cache.close()
        services.events.close()
        await shared.close()
