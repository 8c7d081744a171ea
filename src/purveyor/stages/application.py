"""`Stages`: the endpoints of one application, its queues and its database; and `send`, `ask` and `replay`."""

import asyncio
import contextlib
import logging
import os
import socket
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self, TypeVar, overload

from purveyor.jetstream.connection import NatsSubscription
from purveyor.model import tracing
from purveyor.model.errors import AlreadyExists, InvalidConfig, NoAnswer, UnknownMessage
from purveyor.model.event import Event
from purveyor.queues.catalogue import DEAD_LETTERS, STAGE_REPLIES, Queue, check_endpoint, endpoint_queue, stage_durable
from purveyor.queues.client import Queues
from purveyor.stages.endpoint import Endpoint, Timing
from purveyor.stages.flow import FLOW, Flow, Frame, Outgoing, check_sendable, event_message, first_message
from purveyor.stages.handler_types import NewFlow, Target, checked_event, new_id
from purveyor.stages.message_codec import load
from purveyor.stages.relay import Relay
from purveyor.stages.runner import Runner, StageServices
from purveyor.stages.source import QueueSource, Source
from purveyor.stages.sql_store import Cleanup, Database, SqlStore
from purveyor.stages.task_cancellation import end_tasks

log = logging.getLogger("purveyor.stages")

Q = TypeVar("Q")
R = TypeVar("R")
S = TypeVar("S")

NoState: Final = type(None)
_PULL_BATCH_MESSAGES: Final = 16
_STOP_TIMEOUT_SECONDS: Final = 10.0
_LAST_SENDING_SECONDS: Final = 5.0
_REPLY_LOOKUP_INTERVAL_SECONDS: Final = 2.0


class Stages:
    """An application with transactional stages.

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
        self._custom_sources: dict[str, Source] = {}
        self.relay = Relay(store, queues, replicas=replicas)
        instance = f"{app}@{socket.gethostname()}:{os.getpid()}:{new_id()[:6]}"
        self._services = StageServices(store, queues, self.relay, instance, self._timing.grace)
        self._request_reply = _RequestReply(queues)
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
        """Declare an endpoint: the types of its request, reply and state (built without arguments for each flow).

        With a `source` its first stage reads from that instead of its own queue.
        """
        if name in self.endpoints:
            raise AlreadyExists(f"the endpoint {name!r} is declared twice", fix="give it another name")
        if self._tasks:
            raise InvalidConfig(f"the endpoint {name!r} is declared after the start", fix="declare it before")
        endpoint: Endpoint[Any, Any, Any] = Endpoint(name, request, reply, state)
        self.endpoints[name] = endpoint
        if source is not None:
            self._custom_sources[name] = source
        return endpoint

    @overload
    def terminator(
        self, name: str, *, message: type[Q], state: type[S], source: Source | None = ...
    ) -> Endpoint[Q, None, S]: ...

    @overload
    def terminator(self, name: str, *, message: type[Q], source: Source | None = ...) -> Endpoint[Q, None, None]: ...

    def terminator(self, name: str, *, message: Any, state: Any = NoState, source: Source | None = None) -> Any:
        """Declare an endpoint without a reply, at which flows end."""
        return self.endpoint(name, request=message, reply=NoState, state=state, source=source)

    def remote(self, name: str, *, request: type[Q], reply: type[R]) -> Target[Q, R]:
        """Return an endpoint of another application, as a target for messages."""
        return Target(check_endpoint(name), request, reply)

    async def send(  # noqa: PLR0913 - each is a property of the message
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
        """Begin a flow; return the id of its first message.

        With `db` (a session or connection) this stores the message in that transaction, and the relay sends it after
        the commit: all or nothing. Without, this publishes the message, and the broker has stored it on return. An `id`
        from the caller makes a repetition harmless. The reply of the endpoint goes to `reply_to`, with `state`.
        """
        first = self._first_message(NewFlow(to, message, key, interactive, reply_to, state), id, trace_id)
        if db is None:
            await self.queues.publish(first.subject, first.data, headers=dict(first.headers), msg_id=first.id)
        else:
            await self.store.put_with(db, [first])
            self.relay.wake()
        return first.id

    async def publish(
        self,
        event: Event,
        *,
        db: Database,
        id: str | None = None,  # noqa: A002 - it is the id of the event
    ) -> str:
        """Publish an event in the transaction of `db`; return its id. The relay sends it after the commit.

        The same as `Context.publish`, for a program that is not a handler. InvalidInput names the wrong field.
        """
        published = checked_event(event, new_id() if id is None else id, self.queues.connection.max_payload)
        trace = tracing.current_carrier() or tracing.NO_TRACE
        message = check_sendable(event_message(published).with_trace(trace), self.queues.connection.max_payload)
        await self.store.put_with(db, [message])
        self.relay.wake()
        return published.id

    async def ask(  # noqa: PLR0913 - each is a property of the message
        self,
        to: Target[Q, R],
        message: Q,
        *,
        timeout: float = 30.0,  # noqa: ASYNC109 - a missing reply is an error of our tree
        key: str | None = None,
        trace_id: str | None = None,
        interactive: bool = True,
    ) -> R:
        """Begin a flow and return its reply. Raises NoAnswer when it does not come in time; the flow continues."""
        first = self._first_message(NewFlow(to, message, key, interactive, None, None), None, trace_id)
        return await self._request_reply.ask(to, first, timeout)

    async def replay(self, since: datetime) -> int:
        """Send the messages since then again, after the broker lost them (an older store); return their number.

        A receiver that has processed a message drops it by its inbox.
        """
        async with self.store.transaction() as transaction:
            found = await self.store.statements.replay(transaction.connection, int(since.timestamp() * 1000))
        self.relay.wake()
        return found

    def _first_message(self, new_flow: NewFlow, given_id: str | None, trace: str | None) -> Outgoing:
        message_id = given_id or new_id()
        message = first_message(new_flow, message_id, trace or message_id)
        return check_sendable(
            message.with_trace(tracing.current_carrier() or tracing.NO_TRACE), self.queues.connection.max_payload
        )

    def queue(self, endpoint: Endpoint[Any, Any, Any]) -> Queue:
        """Return the queue of an endpoint."""
        return endpoint_queue(endpoint.name, len(endpoint.stages), ack_wait=self._timing.ack_wait)

    async def start(self) -> None:
        """Check the declarations, ensure the queues, and start the stages."""
        for endpoint in self.endpoints.values():
            endpoint.check()
        await self.store.open()
        queues = [DEAD_LETTERS, STAGE_REPLIES, *(self.queue(endpoint) for endpoint in self.endpoints.values())]
        for queue in queues:
            (await self.queues.ensure(queue, replicas=self._replicas)).require_usable()
        sources: dict[str, Source] = {}
        for endpoint in self.endpoints.values():
            for stage in endpoint.stages:
                stage_sources = self._sources(endpoint, stage.number)
                sources[stage.id] = stage_sources[0]
                self.runners.append(Runner(stage, stage_sources, self._services))
        cleanup = Cleanup(self.store, sources, self._timing)
        coroutines = [self.relay.run(), cleanup.run(), *(runner.run() for runner in self.runners)]
        self._tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]

    async def stop(self) -> None:
        """Finish the messages in work, send what is committed, and stop."""
        await asyncio.gather(*(runner.stop(_STOP_TIMEOUT_SECONDS) for runner in self.runners))
        if self._tasks and self.queues.connection.connected:
            await self._send_committed()
        await end_tasks(self._tasks)
        self._tasks, self.runners = [], []
        await self._request_reply.close()
        await self.store.close()

    async def _send_committed(self) -> None:
        """Wait for the relay to send what is in the outbox, or for a short time: else the next relay sends it."""
        sent = asyncio.Event()

        async def note() -> None:
            sent.set()

        self.relay.after_sending(note)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SENDING_SECONDS):
                await sent.wait()

    async def serve(self) -> None:
        """Start the stages and run them until cancelled."""
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
        if number == 0 and endpoint.name in self._custom_sources:
            return [self._custom_sources[endpoint.name]]
        stream = self.queue(endpoint).stream
        return [
            QueueSource(
                self.queues,
                stream,
                stage_durable(number, interactive=interactive),
                self._timing.ack_wait,
                chunk=_PULL_BATCH_MESSAGES,
            )
            for interactive in (False, True)
        ]


class _RequestReply:
    """The open requests of `Stages.ask` in one process, and the subject of their replies.

    The last stage stores a reply in the queue `stage-replies` like any message. This process subscribes to the subjects
    of its replies and gets them at once; after a lost connection it looks them up in the queue.
    """

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._prefix = f"stage-replies.{new_id()}"
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._subscription: NatsSubscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def ask(self, to: Target[Any, R], first: Outgoing, timeout_seconds: float) -> R:
        """Send the first message of a flow, with a frame for this process on its stack, and return the reply."""
        await self._subscribe()
        subject = f"{self._prefix}.{first.id}"
        flow = Flow.from_headers({name: (value,) for name, value in first.headers.items()}, first.id)
        headers = {**first.headers, FLOW: replace(flow, stack=(Frame(subject), *flow.stack)).to_header()}
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[subject] = reply
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._queues.publish(first.subject, first.data, headers=headers, msg_id=first.id)
                return load(to.reply, await self._wait(subject, reply))
        except TimeoutError:
            raise NoAnswer(
                f"endpoint {to.name!r} did not reply within {timeout_seconds:g} s to message {first.id}",
                fix="the flow continues; look at `purveyor stages list` and the dead letters",
            ) from None
        finally:
            del self._waiting[subject]

    async def _wait(self, subject: str, reply: "asyncio.Future[bytes]") -> bytes:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPLY_LOOKUP_INTERVAL_SECONDS):
                    return await asyncio.shield(reply)
            with contextlib.suppress(UnknownMessage):
                return (await self._queues.streams.get_last(STAGE_REPLIES.stream, subject)).data

    async def _subscribe(self) -> None:
        if self._task is None:
            self._subscription = await self._queues.connection.subscribe(f"{self._prefix}.*", confirm=True)
            self._task = asyncio.create_task(self._receive(self._subscription))

    async def _receive(self, subscription: NatsSubscription) -> None:
        async for message in subscription:
            waiting = self._waiting.get(message.subject)
            if waiting is not None and not waiting.done():
                waiting.set_result(message.data)

    async def close(self) -> None:
        """End the subscription."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
        if self._subscription is not None:
            await self._subscription.close()
