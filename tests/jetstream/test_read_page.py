"""One direct get reads a page of messages in order; `subscribe_once` receives one message."""

import asyncio

import pytest

from purveyor.jetstream.config import StreamConfig
from purveyor.jetstream.streams import Page, PageRequest, read_page
from purveyor.model.errors import UnknownStream
from purveyor.queues.client import Queues


async def test_pages_follow_one_another_without_gap(queues: Queues, unique: str) -> None:
    subjects = (f"{unique}.a", f"{unique}.b")
    await queues.streams.add(StreamConfig(name=unique, subjects=subjects, allow_direct=True))
    assert await read_page(queues, unique, PageRequest(subject=subjects[0])) == Page(messages=(), has_more=False)
    for number in range(6):
        await queues.publish(subjects[number % 2], str(number).encode(), headers={"Tag": ["x", "y"]})
    first = await read_page(queues, unique, PageRequest(subject=subjects[0], count=2))
    assert ([message.data for message in first.messages], first.has_more) == ([b"0", b"2"], True)
    assert first.messages[0] == await queues.streams.get(unique, 1)
    second = await read_page(queues, unique, PageRequest(subject=subjects[0], from_sequence=4))
    assert ([message.sequence for message in second.messages], second.has_more) == ([5], False)
    small = await read_page(queues, unique, PageRequest(subject=f"{unique}.*", max_bytes=1))
    assert (len(small.messages), small.has_more) == (1, True)


async def test_a_page_of_an_unknown_stream_is_an_error(queues: Queues, unique: str) -> None:
    with pytest.raises(UnknownStream):
        await read_page(queues, unique, PageRequest(subject=unique))


async def test_subscribe_once_receives_one_message(queues: Queues, unique: str) -> None:
    received = asyncio.Queue[int]()
    await queues.connection.subscribe_once(unique, lambda: received.put_nowait(1))
    for _ in range(3):
        await queues.connection.publish(unique)
    await queues.connection.flush()
    await asyncio.wait_for(received.get(), 120)
    await queues.connection.flush()
    assert received.empty()
