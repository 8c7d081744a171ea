"""A page of messages is read in one question, whole and in order, and a subject can be listened to once."""

import asyncio

import pytest

from purveyor.jetstream.config import StreamConfig
from purveyor.jetstream.direct_get import Page, Wanted, read_page
from purveyor.model.errors import UnknownStream
from purveyor.queues.client import Queues


async def test_pages_follow_one_another_without_gap(queues: Queues, unique: str) -> None:
    subjects = (f"{unique}.a", f"{unique}.b")
    await queues.streams.add(StreamConfig(name=unique, subjects=subjects, allow_direct=True))
    assert await read_page(queues, unique, Wanted(subject=subjects[0])) == Page(messages=(), more=False)
    for number in range(6):
        await queues.publish(subjects[number % 2], str(number).encode(), headers={"Tag": ["x", "y"]})
    first = await read_page(queues, unique, Wanted(subject=subjects[0], count=2))
    assert ([message.data for message in first.messages], first.more) == ([b"0", b"2"], True)
    assert first.messages[0] == await queues.streams.get(unique, 1)
    second = await read_page(queues, unique, Wanted(subject=subjects[0], from_sequence=4))
    assert ([message.sequence for message in second.messages], second.more) == ([5], False)
    small = await read_page(queues, unique, Wanted(subject=f"{unique}.*", max_bytes=1))
    assert (len(small.messages), small.more) == (1, True)


async def test_a_page_of_no_stream_is_an_error(queues: Queues, unique: str) -> None:
    with pytest.raises(UnknownStream):
        await read_page(queues, unique, Wanted(subject=unique))


async def test_one_who_listens_once_hears_once(queues: Queues, unique: str) -> None:
    heard = asyncio.Queue[int]()
    await queues.connection.listen_once(unique, lambda: heard.put_nowait(1))
    for _ in range(3):
        await queues.connection.publish(unique)
    await queues.connection.flush()
    await asyncio.wait_for(heard.get(), 120)
    await queues.connection.flush()
    assert heard.empty()
