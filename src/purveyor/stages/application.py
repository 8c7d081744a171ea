"""`Stages`: the endpoints of one application on its queues and its database; declared, started, spoken to."""

import asyncio
import contextlib
import logging
import os
import socket
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self, TypeVar, overload

from purveyor.model import tracing
from purveyor.model.errors import AlreadyExists, InvalidConfig
from purveyor.queues.catalogue import DEAD_LETTERS, Queue
from purveyor.queues.client import Queues
from purveyor.queues.stage_queues import STAGE_REPLIES, check_endpoint, endpoint_queue, stage_durable
from purveyor.stages.cleanup import Upkeep
from purveyor.stages.endpoint import Endpoint
from purveyor.stages.flow import Outgoing, check_sendable, new_id
from purveyor.stages.handler_types import Sent, Target
from purveyor.stages.outgoing_messages import beginning
from purveyor.stages.relay import Relay
from purveyor.stages.request_reply import Asking
from purveyor.stages.runner import Parts, Runner
from purveyor.stages.source import QueueSource, Source
from purveyor.stages.sql_store import Database, SqlStore
from purveyor.stages.timeouts import Timing

log = logging.getLogger("purveyor.stages")

Q = TypeVar("Q")
R = TypeVar("R")
S = TypeVar("S")

NoState: Final = type(None)
_CHUNK: Final = 16
_STOP_SECONDS: Final = 10.0


class Stages:
    """Transactional stages; see the guide.

    stages = Stages(queues, store=SqlStore("sqlite:///shop.db"), app="shop")
    orders = stages.endpoint("orders.place", request=PlaceOrder, reply=Placed, state=OrderState)

    @orders.last_stage(exactly_once=True)
    async def place(ctx: Context[OrderState], message: PlaceOrder, db: AsyncSession) -> Placed: ...

    async with stages:
        placed = await stages.ask(orders, PlaceOrder("book"))
    """

    def __init__(
        self,
        queues: Queues,
        *,
        store: SqlStore,
        app: str,
        replicas: int = 1,
        timing: Timing | None = None,
    ) -> None:
        self.queues = queues
        self.store = store
        self.app = check_endpoint(app)
        self.endpoints: dict[str, Endpoint[Any, Any, Any]] = {}
        self._replicas = replicas
        self._timing = timing or Timing()
        self._fed: dict[str, Source] = {}
        self.relay = Relay(store, queues)
        instance = f"{app}@{socket.gethostname()}:{os.getpid()}:{new_id()[:6]}"
        self._parts = Parts(store, queues, self.relay, instance, self._timing.grace)
        self._asking = Asking(queues)
        self.runners: list[Runner] = []
        self._tasks: list[asyncio.Task[None]] = []

    @overload
    def endpoint(
        self, name: str, *, request: type[Q], reply: type[R], state: type[S], source: Source | None = ...
    ) -> Endpoint[Q, R, S]: ...

    @overload
    def endpoint(
        self, name: str, *, request: type[Q], reply: type[R], source: Source | None = ...
    ) -> Endpoint[Q, R, None]: ...

    def endpoint(
        self, name: str, *, request: Any, reply: Any, state: Any = NoState, source: Source | None = None
    ) -> Any:
        """Declare an endpoint: what it takes and replies, and the state of its flows (made anew without arguments).

        With a `source` its first stage is fed by that instead of its own queue.
        """
        if name in self.endpoints:
            raise AlreadyExists(f"the endpoint {name!r} is declared twice", fix="give it another name")
        if self._tasks:
            raise InvalidConfig(f"the endpoint {name!r} is declared after the start", fix="declare it before")
        made: Endpoint[Any, Any, Any] = Endpoint(name, request, reply, state)
        self.endpoints[name] = made
        if source is not None:
            self._fed[name] = source
        return made

    @overload
    def terminator(
        self, name: str, *, message: type[Q], state: type[S], source: Source | None = ...
    ) -> Endpoint[Q, None, S]: ...

    @overload
    def terminator(self, name: str, *, message: type[Q], source: Source | None = ...) -> Endpoint[Q, None, None]: ...

    def terminator(self, name: str, *, message: Any, state: Any = NoState, source: Source | None = None) -> Any:
        """Declare an endpoint that replies nothing: where flows end."""
        return self.endpoint(name, request=message, reply=NoState, state=state, source=source)

    def remote(self, name: str, *, request: type[Q], reply: type[R]) -> Target[Q, R]:
        """An endpoint of another application, to send to."""
        return Target(check_endpoint(name), request, reply)

    async def send(  # noqa: PLR0913 - each is a word about the message
        self,
        to: Target[Q, R],
        message: Q,
        *,
        db: Database | None = None,
        key: str | None = None,
        id: str | None = None,  # noqa: A002 - it is the id of the message
        trace_id: str | None = None,
        interactive: bool = False,
        reply_to: Target[R, Any] | None = None,
        state: object = None,
    ) -> str:
        """Begin a flow; the id of its first message.

        With `db` (a session or connection) it is stored in that transaction, and sent when it is committed: all or
        nothing. Without, it is sent now, and stored by the broker when this returns. An `id` of your own makes sending
        it again harmless. What the endpoint replies goes to `reply_to`, with `state`.
        """
        opening = self._opening(Sent(to, message, key, interactive, reply_to, state), id, trace_id)
        if db is None:
            await self.queues.publish(opening.subject, opening.data, headers=dict(opening.headers), msg_id=opening.id)
        else:
            await self.store.put_with(db, [opening])
            self.relay.wake()
        return opening.id

    async def ask(  # noqa: PLR0913 - each is a word about the message
        self,
        to: Target[Q, R],
        message: Q,
        *,
        timeout: float = 30.0,  # noqa: ASYNC109 - an answer that never comes is told in our words
        key: str | None = None,
        trace_id: str | None = None,
        interactive: bool = True,
    ) -> R:
        """Begin a flow and wait for its reply. NoAnswer when it does not come in time; the flow goes on."""
        opening = self._opening(Sent(to, message, key, interactive, None, None), None, trace_id)
        return await self._asking.ask(to, opening, timeout)

    async def replay(self, since: datetime) -> int:
        """Send again what was sent since then, after the broker lost it (an older store put back); how many.

        Whoever has processed a message knows it by its inbox.
        """
        async with self.store.transaction() as transaction:
            found = await self.store.statements.replay(transaction.connection, int(since.timestamp() * 1000))
        self.relay.wake()
        return found

    def _opening(self, sent: Sent, given: str | None, trace: str | None) -> Outgoing:
        message_id = given or new_id()
        opening = beginning(sent, message_id, trace or message_id).traced(tracing.current() or tracing.NONE)
        return check_sendable(opening, self.queues.connection.max_payload)

    def queue(self, endpoint: Endpoint[Any, Any, Any]) -> Queue:
        """The queue of an endpoint."""
        return endpoint_queue(endpoint.name, len(endpoint.stages), ack_wait=self._timing.ack_wait)

    async def start(self) -> None:
        """Check the declarations, make the queues, and begin to work."""
        for endpoint in self.endpoints.values():
            endpoint.check()
        await self.store.open()
        queues = [DEAD_LETTERS, STAGE_REPLIES, *(self.queue(endpoint) for endpoint in self.endpoints.values())]
        for queue in queues:
            (await self.queues.ensure(queue, replicas=self._replicas)).require_usable()
        sources: dict[str, Source] = {}
        for endpoint in self.endpoints.values():
            for stage in endpoint.stages:
                its = self._sources(endpoint, stage.number)
                sources[stage.id] = its[0]
                self.runners.append(Runner(stage, its, self._parts))
        upkeep = Upkeep(self.store, sources, self._timing)
        works = [self.relay.run(), upkeep.run(), *(runner.run() for runner in self.runners)]
        self._tasks = [asyncio.create_task(work) for work in works]

    async def stop(self) -> None:
        """Let what has begun come to its end, and stop."""
        await asyncio.gather(*(runner.stop(_STOP_SECONDS) for runner in self.runners))
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks, self.runners = [], []
        await self._asking.close()
        await self.store.close()

    async def serve(self) -> None:
        """Start, and work until cancelled."""
        async with self:
            await asyncio.gather(*self._tasks)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _sources(self, endpoint: Endpoint[Any, Any, Any], number: int) -> list[Source]:
        if number == 0 and endpoint.name in self._fed:
            return [self._fed[endpoint.name]]
        stream = self.queue(endpoint).stream
        return [
            QueueSource(
                self.queues, stream, stage_durable(number, interactive=interactive), self._timing.ack_wait, chunk=_CHUNK
            )
            for interactive in (False, True)
        ]
