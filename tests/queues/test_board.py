"""What a part says of itself is read from wherever somebody looks; the server says when it was said."""

from datetime import UTC, datetime

from purveyor.queues import board
from purveyor.queues.address import Address
from purveyor.queues.client import Queues
from purveyor.queues.keyvalue import Bucket


async def test_the_last_word_of_each_part_is_read_with_its_time(queues: Queues, address: Address, unique: str) -> None:
    for number in (1, 2):
        board.post(address, f"{unique}.one", {"number": number})
    board.post(address, f"{unique}.two", {"number": 3})
    found = await board.read(queues, unique)
    assert [(each.key, each.value["number"]) for each in found] == [(f"{unique}.one", 2), (f"{unique}.two", 3)]
    assert all(each.at is not None and abs((datetime.now(UTC) - each.at).total_seconds()) < 60 for each in found)


async def test_what_is_no_notice_is_left_out(queues: Queues, address: Address, unique: str) -> None:
    board.post(address, f"{unique}.kept", {})
    bucket: Bucket = await queues.bucket(board.STATUS)
    await bucket.put(f"{unique}.rubbish", b"\xff not JSON")
    await bucket.put(f"{unique}.gone", b"{}")
    await bucket.delete(f"{unique}.gone")
    assert [each.key for each in await board.read(queues, unique)] == [f"{unique}.kept"]


async def test_a_board_that_nobody_wrote_to_is_empty(queues: Queues, unique: str) -> None:
    assert await board.read(queues, unique) == []
