"""A message that cannot be sent becomes a dead letter with the reason; the messages around it are delivered."""

from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from purveyor.delivery.push.push_worker import PushWorker
from purveyor.model.delivery_policy import AfterDeadLetter, OrderBy, PushFormat
from tests.support import malformed_messages
from tests.support.push import Events, PushSubscription

Work = Callable[..., Awaitable[PushWorker]]
FORMS = [*PushFormat]
CANNOT = {
    PushFormat.PUBSUB: {"a number that is none"},  # JSON can name half of a pair
    PushFormat.RAW: {"half in an attribute name", "half in the realm", "half in the key", "attributes of other kinds"},
    PushFormat.CLOUDEVENTS: {"half in the realm", "half in the topic", "half in the key", "attributes of other kinds"},
}
"""Some that each form cannot carry."""


@pytest.mark.parametrize("order_by", [None, OrderBy.KEY, OrderBy.POSITION], ids=["any", "key", "position"])
@pytest.mark.parametrize("form", FORMS, ids=[form.value for form in FORMS])
async def test_malformed_messages_are_sent_or_parked_and_delay_nothing(
    pushed: PushSubscription, work: Work, events: Events, form: PushFormat, order_by: OrderBy | None
) -> None:
    await pushed.add("/ok", format=form, order_by=order_by)
    subject = f"{pushed.name}.main"
    await pushed.write(*({} for _ in range(5)))
    for body, lines in malformed_messages.ALL.values():
        await malformed_messages.put(pushed.queues, subject, body, lines)
        await pushed.write({})
    await work()
    await pushed.drained()
    good = len(malformed_messages.ALL) + 5
    assert dict.fromkeys(range(1, good + 1), 1) == Counter(n for n in pushed.acked() if n in range(1, good + 1))
    letters = await pushed.letters()
    assert len(pushed.seen()) + len(letters) == good + len(malformed_messages.ALL)
    assert all(f"as {form.value}" in each.reason for each in letters)
    found = {name for name, (body, _) in malformed_messages.ALL.items() if body in {each.data for each in letters}}
    assert found >= CANNOT[form]
    assert not [each for each in events if each[1] == "failed"]


@pytest.mark.parametrize("form", [PushFormat.RAW, PushFormat.CLOUDEVENTS])
async def test_headers_end_where_they_should(pushed: PushSubscription, work: Work, form: PushFormat) -> None:
    """A line break in a value must not begin a header, or a request, of its own."""
    await pushed.add("/ok", format=form)
    for name in ("line breaks in attributes", "line breaks everywhere", "not latin-1"):
        await malformed_messages.put(pushed.queues, f"{pushed.name}.main", malformed_messages.BODIES[name])
    await malformed_messages.put(
        pushed.queues, f"{pushed.name}.main", b"{}", malformed_messages.HEADERS["an id with a line break"]
    )
    await work()
    await pushed.drained()
    assert len(pushed.seen()) == 4
    assert not [name for each in pushed.seen() for name in each["headers"] if "evil" in name]


async def test_what_was_answered_before_a_message_that_cannot_be_sent_is_acknowledged(
    pushed: PushSubscription, work: Work, events: Events
) -> None:
    await pushed.add("/slow/0.3", format=PushFormat.RAW)
    await pushed.write({}, {}, {})
    await malformed_messages.put(
        pushed.queues, f"{pushed.name}.main", malformed_messages.BODIES["half in an attribute name"]
    )
    await pushed.write({}, {}, {})
    await work()
    await pushed.drained()
    assert sorted(pushed.acked()) == [1, 2, 3, 4, 5, 6]
    (letter,) = await pushed.letters()
    assert r"it cannot be sent as raw: '\ud800' holds half of a surrogate pair" in letter.reason
    assert letter.attempts == 1


async def test_a_key_is_parked_with_a_message_that_cannot_be_sent(pushed: PushSubscription, work: Work) -> None:
    policy = AfterDeadLetter.PARK_KEY
    await pushed.add("/ok", format=PushFormat.RAW, order_by=OrderBy.KEY, after_dead_letter=policy)
    await malformed_messages.put(
        pushed.queues, f"{pushed.name}.main", malformed_messages.BODIES["half in an attribute name"]
    )
    await pushed.write({"uuid": "u-1"}, {"uuid": "u-2"})
    await work()
    await pushed.drained()
    assert [each["key"] for each in pushed.seen()] == ["u-2"]
    first, second = await pushed.letters()
    assert "half of a surrogate pair" in first.reason
    assert "parked with an earlier message about 'u-1'" in second.reason
