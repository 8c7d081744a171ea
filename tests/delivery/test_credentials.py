import asyncio
from collections.abc import Iterator

import pytest

from purveyor.delivery.credentials import BUCKET, MAX_TOKENS_PER_LOGIN, Credentials, PasswordHasher, token_key
from purveyor.delivery.tokens import TokenOptions
from purveyor.model.errors import AlreadyExists, NotFound, Refused
from purveyor.queues.client import Queues
from tests.support.waiting import until


@pytest.fixture
def hasher() -> Iterator[PasswordHasher]:
    made = PasswordHasher()
    yield made
    made.close()


@pytest.fixture
def credentials(queues: Queues, hasher: PasswordHasher) -> Credentials:
    return Credentials(queues, hasher)


async def incarnation_for(credentials: Credentials, password: str) -> str | None:
    found = await credentials.check_password("ox", password)
    return None if found is None else found.incarnation


async def test_a_password_is_valid_for_its_incarnation_only(credentials: Credentials) -> None:
    assert await credentials.set_first_password("ox", "one", "secret")
    assert not await credentials.set_first_password("ox", "one", "secret")
    with pytest.raises(AlreadyExists, match="another password"):
        await credentials.set_first_password("ox", "one", "other")
    assert await incarnation_for(credentials, "secret") == "one"
    assert await incarnation_for(credentials, "Secret") is None
    assert await credentials.set_first_password("ox", "two", "other")
    assert await incarnation_for(credentials, "secret") is None
    await credentials.remove("ox", "one")
    assert await incarnation_for(credentials, "other") == "two"
    await credentials.remove("ox", "two")
    assert await incarnation_for(credentials, "other") is None
    assert await credentials.set_first_password("ox", "three", "third")


async def test_of_many_concurrent_first_passwords_one_is_set(credentials: Credentials) -> None:
    found = await asyncio.gather(
        *(credentials.set_first_password("ox", "one", f"secret-{number}") for number in range(5)),
        return_exceptions=True,
    )
    assert found.count(True) == 1
    assert sum(isinstance(each, AlreadyExists) for each in found) == 4
    assert await incarnation_for(credentials, f"secret-{found.index(True)}") == "one"


async def is_over(credentials: Credentials, password: str) -> bool:
    return await incarnation_for(credentials, password) is None


async def test_the_previous_password_stays_valid_for_a_while(credentials: Credentials) -> None:
    await credentials.set_first_password("ox", "one", "first")
    await credentials.set_password("ox", "one", "second", keep_seconds=60)
    assert await incarnation_for(credentials, "first") == await incarnation_for(credentials, "second") == "one"
    await credentials.set_password("ox", "one", "third", keep_seconds=0.05)
    assert await incarnation_for(credentials, "first") is None
    await until(lambda: is_over(credentials, "second"))
    assert await incarnation_for(credentials, "third") == "one"


async def test_a_token_authenticates_its_login_until_it_ends(credentials: Credentials) -> None:
    token, text = await credentials.add_token("ox", "one", TokenOptions(label="host a"))
    assert await credentials.check_token(text) == token
    assert await credentials.tokens("ox") == [token]
    assert await credentials.tokens("other") == []
    assert await credentials.check_token(text[:-1] + ("a" if text[-1] != "a" else "b")) is None
    assert await credentials.check_token("pvr_nonsense") is None
    with pytest.raises(NotFound):
        await credentials.remove_token("other", token.id)
    await credentials.remove_token("ox", token.id)
    assert await credentials.check_token(text) is None
    brief, text = await credentials.add_token("ox", "one", TokenOptions(seconds=0.05))
    await until(lambda: not brief.is_valid)
    assert await credentials.check_token(text) is None


async def test_a_token_made_with_a_token_is_valid_only_while_that_is(credentials: Credentials, queues: Queues) -> None:
    """Also if another process created it while its parent was removed, so that only the parent is gone."""
    parent, _ = await credentials.add_token("ox", "one")
    child, text = await credentials.add_token("ox", "one", TokenOptions(parent=parent.id))
    assert await credentials.check_token(text) == child
    await (await queues.bucket(BUCKET)).delete(token_key(parent.id))
    assert await credentials.check_token(text) is None
    assert child not in await credentials.tokens("ox")


async def test_tokens_that_have_ended_are_swept(credentials: Credentials, queues: Queues) -> None:
    """Tokens end by time, with their password and with their parent token; all others stay."""
    await credentials.set_first_password("ox", "one", "first")
    brief, _ = await credentials.add_token("ox", "one", TokenOptions(seconds=0.05))
    replaced, _ = await credentials.add_token("ox", "one")
    child, _ = await credentials.add_token("admin", None, TokenOptions(parent=replaced.id))
    await credentials.set_password("ox", "one", "second")
    kept, _ = await credentials.add_token("ox", "one")
    other, _ = await credentials.add_token("a login: with any name", None)
    bucket = await queues.bucket(BUCKET)
    await until(lambda: not brief.is_valid)
    assert {token_key(each.id) for each in (brief, replaced, child)} < set(await bucket.keys())
    assert await credentials.remove_invalid_tokens() >= 3
    left = {key for key in await bucket.keys() if key.startswith("token.")}
    assert left >= {token_key(kept.id), token_key(other.id)}
    assert not left & {token_key(each.id) for each in (brief, replaced, child)}
    assert await credentials.remove_invalid_tokens() == 0
    assert await credentials.tokens("ox") == [kept]


async def test_concurrent_requests_do_not_exceed_the_tokens_of_a_login(credentials: Credentials) -> None:
    found = await asyncio.gather(
        *(credentials.add_token("ox", "one") for _ in range(MAX_TOKENS_PER_LOGIN + 10)), return_exceptions=True
    )
    refused = [each for each in found if isinstance(each, Refused)]
    assert len(refused) == 10
    assert len(await credentials.tokens("ox")) == MAX_TOKENS_PER_LOGIN


async def test_a_token_created_during_a_password_change_ends_with_the_old_password(credentials: Credentials) -> None:
    """The creator logged in with the old password, and the new one is set before the token is stored."""
    await credentials.set_first_password("ox", "one", "first")
    opened = await credentials.check_password("ox", "first")
    assert opened is not None
    await credentials.set_password("ox", "one", "second")
    with pytest.raises(Refused, match="no longer valid"):
        await credentials.add_token("ox", "one", TokenOptions(generation=opened.generation))
    assert await credentials.tokens("ox") == []


async def test_a_deleted_subscription_leaves_no_token(credentials: Credentials) -> None:
    old, _ = await credentials.add_token("ox", "one")
    new, _ = await credentials.add_token("ox", "two")
    await credentials.remove("ox", "one")
    assert await credentials.tokens("ox") == [new] != [old]


async def test_stored_credentials_cannot_be_used_to_log_in(credentials: Credentials, queues: Queues) -> None:
    await credentials.set_first_password("ox", "one", "the secret")
    _, text = await credentials.add_token("ox", "one")
    bucket = await queues.bucket(BUCKET)
    for key in await bucket.keys():
        stored = (await bucket.get(key)).value.decode()
        assert "the secret" not in stored
        assert (
            text.split("_", 2)[2] not in stored
        )  # the part after prefix and id, which may contain an underscore itself


async def test_changes_are_reported_to_followers(credentials: Credentials) -> None:
    await credentials.set_first_password("before", "one", "secret")
    changes: asyncio.Queue[str | None] = asyncio.Queue()
    begun = asyncio.Event()
    following = asyncio.create_task(credentials.follow(changes.put_nowait, begun.set))
    await asyncio.wait_for(begun.wait(), 120)
    assert changes.get_nowait() is None  # cached logins may be out of date
    await credentials.set_first_password("ox", "one", "secret")
    assert await asyncio.wait_for(changes.get(), 120) == "subscription.ox"
    token, _ = await credentials.add_token("ox", "one")
    assert await asyncio.wait_for(changes.get(), 120) == f"token.{token.id}"
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_check_takes_the_same_work_whether_there_is_a_hash_or_not(hasher: PasswordHasher) -> None:
    stored = await hasher.hash("secret")
    assert await hasher.verify(stored, "secret")
    assert not await hasher.verify(stored, "other")
    assert not await hasher.verify(None, "secret")
    assert not await hasher.verify("no hash at all", "secret")
