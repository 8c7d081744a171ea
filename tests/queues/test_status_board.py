"""Any process reads the notice of a part; the server stamps its time."""

from datetime import UTC, datetime

from purveyor.jetstream.address import Address
from purveyor.jetstream.key_value import Bucket
from purveyor.queues import status_board
from purveyor.queues.client import Queues


async def test_the_last_word_of_each_part_is_read_with_its_time(queues: Queues, address: Address, unique: str) -> None:
    for number in (1, 2):
        status_board.post_notice(address, f"{unique}.one", {"number": number})
    status_board.post_notice(address, f"{unique}.two", {"number": 3})
    found = await status_board.read_notices(queues, unique)
    assert [(each.key, each.value["number"]) for each in found] == [(f"{unique}.one", 2), (f"{unique}.two", 3)]
    assert all(each.at is not None and abs((datetime.now(UTC) - each.at).total_seconds()) < 60 for each in found)


async def test_what_is_no_notice_is_left_out(queues: Queues, address: Address, unique: str) -> None:
    status_board.post_notice(address, f"{unique}.kept", {})
    bucket: Bucket = await queues.bucket(status_board.STATUS)
    await bucket.put(f"{unique}.rubbish", b"\xff not JSON")
    await bucket.put(f"{unique}.gone", b"{}")
    await bucket.delete(f"{unique}.gone")
    assert [each.key for each in await status_board.read_notices(queues, unique)] == [f"{unique}.kept"]


async def test_a_board_without_notices_is_empty(queues: Queues, unique: str) -> None:
    assert await status_board.read_notices(queues, unique) == []
