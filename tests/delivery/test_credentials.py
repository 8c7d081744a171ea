import asyncio
from collections.abc import Iterator

import pytest

from purveyor.delivery.credentials import BUCKET, Credentials
from purveyor.delivery.hashing import Hasher
from purveyor.model.errors import AlreadyExists, NotFound
from purveyor.queues.client import Queues


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    made = Hasher()
    yield made
    made.close()


@pytest.fixture
def credentials(queues: Queues, hasher: Hasher) -> Credentials:
    return Credentials(queues, hasher)


async def opens(credentials: Credentials, password: str) -> str | None:
    found = await credentials.check_password("ox", password)
    return None if found is None else found.incarnation


async def test_a_password_opens_its_incarnation_alone(credentials: Credentials) -> None:
    assert await credentials.set_first("ox", "one", "secret")
    assert not await credentials.set_first("ox", "one", "secret")
    with pytest.raises(AlreadyExists, match="another password"):
        await credentials.set_first("ox", "one", "other")
    assert await opens(credentials, "secret") == "one"
    assert await opens(credentials, "Secret") is None
    assert await credentials.set_first("ox", "two", "other")
    assert await opens(credentials, "secret") is None
    await credentials.remove("ox", "one")
    assert await opens(credentials, "other") == "two"
    await credentials.remove("ox", "two")
    assert await opens(credentials, "other") is None
    assert await credentials.set_first("ox", "three", "third")


async def test_of_many_first_passwords_one_counts(credentials: Credentials) -> None:
    found = await asyncio.gather(
        *(credentials.set_first("ox", "one", f"secret-{number}") for number in range(5)), return_exceptions=True
    )
    assert found.count(True) == 1
    assert sum(isinstance(each, AlreadyExists) for each in found) == 4
    assert await opens(credentials, f"secret-{found.index(True)}") == "one"


async def test_the_last_password_stays_for_a_while(credentials: Credentials) -> None:
    await credentials.set_first("ox", "one", "first")
    await credentials.set_password("ox", "one", "second", keep_seconds=60)
    assert await opens(credentials, "first") == await opens(credentials, "second") == "one"
    await credentials.set_password("ox", "one", "third", keep_seconds=0.05)
    assert await opens(credentials, "first") is None
    await asyncio.sleep(0.05)
    assert await opens(credentials, "second") is None
    assert await opens(credentials, "third") == "one"


async def test_a_token_speaks_for_its_login_until_it_ends(credentials: Credentials) -> None:
    token, text = await credentials.add_token("ox", "one", label="host a")
    assert await credentials.check_token(text) == token
    assert await credentials.tokens("ox") == [token]
    assert await credentials.tokens("other") == []
    assert await credentials.check_token(text[:-1] + ("a" if text[-1] != "a" else "b")) is None
    assert await credentials.check_token("pvr_nonsense") is None
    with pytest.raises(NotFound):
        await credentials.remove_token("other", token.id)
    await credentials.remove_token("ox", token.id)
    assert await credentials.check_token(text) is None
    brief, text = await credentials.add_token("ox", "one", seconds=0.05)
    await asyncio.sleep(0.05)
    assert not brief.valid
    assert await credentials.check_token(text) is None


async def test_a_deleted_subscription_leaves_no_token(credentials: Credentials) -> None:
    old, _ = await credentials.add_token("ox", "one")
    new, _ = await credentials.add_token("ox", "two")
    await credentials.remove("ox", "one")
    assert await credentials.tokens("ox") == [new] != [old]


async def test_nothing_that_is_kept_can_be_used(credentials: Credentials, queues: Queues) -> None:
    await credentials.set_first("ox", "one", "the secret")
    _, text = await credentials.add_token("ox", "one")
    bucket = await queues.bucket(BUCKET)
    for key in await bucket.keys():
        kept = (await bucket.get(key)).value.decode()
        assert "the secret" not in kept
        assert text.split("_", 2)[2] not in kept  # what follows prefix and id, which may have such a line in itself


async def test_changes_are_heard_of(credentials: Credentials) -> None:
    await credentials.set_first("before", "one", "secret")
    heard: asyncio.Queue[str | None] = asyncio.Queue()
    begun = asyncio.Event()
    following = asyncio.create_task(credentials.follow(heard.put_nowait, begun.set))
    await asyncio.wait_for(begun.wait(), 20)
    assert heard.get_nowait() is None  # what was remembered before may be out of date
    await credentials.set_first("ox", "one", "secret")
    assert await asyncio.wait_for(heard.get(), 20) == "subscription.ox"
    token, _ = await credentials.add_token("ox", "one")
    assert await asyncio.wait_for(heard.get(), 20) == f"token.{token.id}"
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_check_takes_the_same_work_whether_there_is_a_hash_or_not(hasher: Hasher) -> None:
    kept = await hasher.hash("secret")
    assert await hasher.verify(kept, "secret")
    assert not await hasher.verify(kept, "other")
    assert not await hasher.verify(None, "secret")
    assert not await hasher.verify("no hash at all", "secret")
