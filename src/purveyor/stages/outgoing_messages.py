"""What a handler returned and sent, as messages. Pure: the same call gives the same messages, with the same ids."""

from collections.abc import Iterator
from typing import Any

from purveyor.model.errors import InvalidConfig, InvalidInput
from purveyor.queues.stage_queues import stage_subject
from purveyor.stages.endpoint import Stage
from purveyor.stages.flow import Flow, Frame, Outgoing, derived_id, message
from purveyor.stages.handler_types import Context, Goto, Next, Reply, Request, Sent, Target
from purveyor.stages.message_codec import dump, to_json


def messages_of(stage: Stage, flow: Flow, context: Context[Any], result: object) -> list[Outgoing]:
    """All messages that one call of a handler causes: what it sent, then what it returned."""
    made = [_sent(flow, context, sent) for sent in context.sends]
    made += _returned(stage, flow, context, result)
    return [
        message(derived_id(stage.id, context.message_id, index), subject, data, going, key)
        for index, (subject, data, going, key) in enumerate(made)
    ]


_Made = tuple[str, bytes, Flow, str | None]


def _returned(stage: Stage, flow: Flow, context: Context[Any], result: object) -> Iterator[_Made]:
    if stage.last and not isinstance(result, Reply | Goto):
        result = Reply(result)
    match result:
        case None:
            return
        case Reply():
            waiting = flow.answering()
            if waiting is not None:
                frame, going = waiting
                yield frame.subject, dump(result.message), going, frame.key
        case Goto():
            going = Flow(flow.trace, None, flow.stack, flow.interactive)
            key = context.key if result.key is None else result.key
            yield first_subject(result.to, going), checked(result.to, result.message), going, key
        case Next():
            going = Flow(flow.trace, to_json(context.state), flow.stack, flow.interactive)
            yield _following(stage, flow), dump(result.message), going, context.key
        case Request():
            frame = Frame(_following(stage, flow), to_json(context.state), context.key)
            going = flow.asking(frame, interactive=result.interactive)
            key = context.key if result.key is None else result.key
            yield first_subject(result.to, going), checked(result.to, result.message), going, key
        case _:
            raise InvalidConfig(
                f"stage {stage.number} of {stage.endpoint!r} returned a {type(result).__name__}",
                fix="return Request, Next, Goto, Reply or None; only the last stage returns the reply itself",
            )


def _sent(flow: Flow, context: Context[Any], sent: Sent) -> _Made:
    interactive = flow.interactive if sent.interactive is None else sent.interactive
    key = context.key if sent.key is None else sent.key
    going = Flow(flow.trace, None, _asked_by(sent.reply_to, sent.state, key, interactive=interactive), interactive)
    return first_subject(sent.to, going), checked(sent.to, sent.message), going, key


def beginning(sent: Sent, message_id: str, trace: str) -> Outgoing:
    """The message that begins a flow outside of any."""
    interactive = bool(sent.interactive)
    stack = _asked_by(sent.reply_to, sent.state, sent.key, interactive=interactive)
    flow = Flow(trace, None, stack, interactive)
    return message(message_id, first_subject(sent.to, flow), checked(sent.to, sent.message), flow, sent.key)


def _asked_by(
    reply_to: Target[Any, Any] | None, state: object, key: str | None, *, interactive: bool
) -> tuple[Frame, ...]:
    if reply_to is None:
        return ()
    return (Frame(stage_subject(reply_to.name, 0, interactive=interactive), to_json(state), key),)


def first_subject(to: Target[Any, Any], flow: Flow) -> str:
    """Where an endpoint begins."""
    return stage_subject(to.name, 0, interactive=flow.interactive)


def checked(to: Target[Any, Any], value: object) -> bytes:
    """A message for an endpoint, as JSON; InvalidInput when it is not what the endpoint takes."""
    wanted: Any = to.request  # a type by its annotation; `list[int]` is none that can be asked
    if isinstance(wanted, type) and not isinstance(value, wanted):
        raise InvalidInput(f"endpoint {to.name!r} takes {wanted.__name__}, not {type(value).__name__}", fix="send that")
    return dump(value)


def _following(stage: Stage, flow: Flow) -> str:
    if stage.last:
        raise InvalidConfig(f"the last stage of {stage.endpoint!r} has none after it", fix="return the reply")
    return stage_subject(stage.endpoint, stage.number + 1, interactive=flow.interactive)
