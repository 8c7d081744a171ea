"""The attempt log of a subscription shows its last attempts, has a bounded size, and never stops push."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from purveyor.delivery.pull import open_pull
from purveyor.delivery.push import attempt_history
from purveyor.delivery.push.attempt_history import RECORDS_PER_RING, AttemptHistory, AttemptRecorder, read_attempts
from purveyor.delivery.push.attempt_record import (
    RECORD_BYTES,
    AttemptPage,
    AttemptQuery,
    AttemptRecord,
    OmittedAttempts,
    PushAttempt,
    RecordBuilder,
    parse_attempt_id,
    search,
)
from purveyor.delivery.push.push_reports import attempts_bucket
from purveyor.delivery.push.push_request import SecretCipher
from purveyor.delivery.push.push_worker import PushWorker
from purveyor.delivery.push.settlement import Action, Decision, Outcome, PushResult
from purveyor.delivery.transitions import DeliveredMessage
from purveyor.model.delivery_policy import RetryPolicy
from purveyor.model.delivery_state import SubjectKind
from purveyor.model.errors import InvalidInput, LeaseLost, UnknownMessage, UnreadableRecord
from purveyor.queues.client import Queues
from tests.support.push import PushSubscription
from tests.support.waiting import until

Work = Callable[..., Awaitable[PushWorker]]
LATER = RetryPolicy(max_attempts=None, min_backoff_seconds=3600, max_backoff_seconds=3600)


async def read(pushed: PushSubscription, **query: object) -> AttemptPage:
    found = await pushed.subscriptions.get(pushed.name)
    return await read_attempts(pushed.queues, found, AttemptQuery(**query))  # type: ignore[arg-type]


async def logged(pushed: PushSubscription, count: int, **query: object) -> AttemptPage:
    """Wait until the log has this many attempts."""
    found: list[AttemptPage] = []

    async def enough() -> bool:
        found.append(await read(pushed, limit=1000, **query))
        return len(found[-1].attempts) >= count

    await until(enough)
    assert len(found[-1].attempts) == count
    return found[-1]


async def test_every_attempt_is_logged_with_its_answer_time_and_key(pushed: PushSubscription, work: Work) -> None:
    await pushed.add("/script")
    await work()
    await pushed.write({"uuid": "ada", "script": [500]}, {"uuid": "bob"})
    await pushed.drained()
    page = await logged(pushed, 3)
    assert [each.order for each in page.attempts] == sorted((each.order for each in page.attempts), reverse=True)
    first = next(each for each in page.attempts if not each.is_acknowledged).to_json()
    assert first | {"time": 0, "id": 0, "event_id": 0, "seconds": 0, "position": 0, "endpoint": 0} == {
        "id": 0,
        "time": 0,
        "sequence": 1,
        "position": 0,
        "kind": "main",
        "realm": "udm",
        "topic": "users/user",
        "key": "ada",
        "event_id": 0,
        "endpoint": 0,
        "attempt": 1,
        "outcome": "failed",
        "action": "retry",
        "status": 500,
        "error": None,
        "seconds": 0,
        "excerpt": "said script",
    }
    assert first["event_id"] == pushed.seen()[0]["id"]
    assert first["position"] == 1_000_001
    assert first["seconds"] >= 0
    ada = await read(pushed, key="ADA")
    assert [(each.attempt, each.outcome) for each in ada.attempts] == [(2, "acknowledged"), (1, "failed")]
    assert [each.sequence for each in (await read(pushed, is_acknowledged=False)).attempts] == [1]
    now = datetime.now(UTC)
    assert not (await read(pushed, since=now + timedelta(hours=1))).attempts
    assert not (await read(pushed, until=now - timedelta(hours=1))).attempts
    newest = await read(pushed, limit=2)
    assert newest.next is not None
    rest = await read(pushed, before=parse_attempt_id(newest.next))
    assert [*newest.attempts, *rest.attempts] == [*page.attempts]
    assert rest.next is None


async def test_the_log_belongs_to_one_life_of_the_subscription_and_stays_after_its_worker(
    pushed: PushSubscription, work: Work, queues: Queues
) -> None:
    await pushed.add("/ok")
    await work()
    await pushed.write({"uuid": "first"})
    await logged(pushed, 1)
    await pushed.subscriptions.delete(pushed.name)
    await pushed.add("/ok")
    await pushed.write({"uuid": "second"})
    page = await logged(pushed, 1)
    assert page.attempts[0].key == "second"


class Mirror(asyncio.Protocol):
    """An endpoint that refuses every message and returns the login of the request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._data = transport, b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, _ = self._data.partition(b"\r\n\r\n")
        if end and len(self._data) - len(head) - 4 >= int(head.lower().split(b"content-length: ")[1].split()[0]):
            login = head.split(b"authorization: ")[1].split(b"\r\n")[0]
            self._transport.write(b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n%s" % (len(login), login))
            self._data = b""


async def test_a_bearer_token_that_an_endpoint_returns_is_not_stored(
    pushed: PushSubscription, work: Work, tmp_path: Path
) -> None:
    server = await asyncio.get_running_loop().create_server(Mirror, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        token = SecretCipher.from_directory(tmp_path).encrypt("token-of-the-endpoint")
        await pushed.add(urls=(f"http://127.0.0.1:{port}/in",), bearer_token=token, retry=LATER)
        await work()
        await pushed.write({"uuid": "ada"})
        page = await logged(pushed, 1)
    assert page.attempts[0].excerpt == "Bearer ***"


async def test_a_message_that_waits_for_its_next_attempt_is_sent_at_once_when_asked(
    pushed: PushSubscription, work: Work, queues: Queues
) -> None:
    pushed.site.set_status(503)
    await pushed.add("/configured", retry=LATER)
    await work()
    await pushed.write({"uuid": "ada"})
    await logged(pushed, 1)
    pushed.site.set_status(204)
    async with open_pull(queues) as pull:

        async def retried() -> bool:
            try:
                await pull.retry(pushed.name, 1, delay=0, instance="operator")
            except LeaseLost:  # the worker has not settled the attempt yet
                return False
            return True

        await until(retried)
        await pushed.drained()
        with pytest.raises(UnknownMessage):
            await pull.retry(pushed.name, 1, delay=0, instance="operator")
    page = await logged(pushed, 2)
    assert [(each.attempt, each.status) for each in page.attempts] == [(2, 204), (1, 503)]


def attempt(number: int, **more: object) -> PushAttempt:
    found = PushAttempt(
        at=1_767_225_600_000 + number,
        sequence=number,
        position=number,
        kind=SubjectKind.MAIN,
        realm="udm",
        topic="users/user",
        key=f"key-{number}",
        event_id=f"{number}@{number}",
        endpoint="https://shop.example/in",
        attempt=1,
        action=Action.ACKNOWLEDGE,
        status=204,
        error=None,
        milliseconds=3,
        excerpt="",
    )
    return found._replace(**more)  # type: ignore[arg-type]


def test_a_record_is_read_as_it_was_written_and_takes_a_bounded_number_of_attempts() -> None:
    wanted = [
        attempt(1),
        attempt(2, key=None, position=None, kind=SubjectKind.RETRY, status=None, error='no "answer"\n', excerpt="é💥"),
        attempt(3, action=Action.GIVE_UP, status=500, key="\ud800"),
    ]
    filled, rest = RecordBuilder(7, "i").plus(wanted, OmittedAttempts(1, 2, 3))
    assert not rest
    record = AttemptRecord.load(filled.dump())
    assert record.attempts == (*wanted[:2], wanted[2]._replace(key="?"))
    assert record.omitted == (OmittedAttempts(1, 2, 3),)
    again = RecordBuilder.from_record(record)
    assert again.dump() == filled.dump()
    many = [attempt(number) for number in range(1000)]
    filled, rest = again.plus(many, None)
    assert filled.is_full
    assert rest == many[len(many) - len(rest) :]
    assert RECORD_BYTES <= len(filled.dump()) < RECORD_BYTES + 2000
    assert len(AttemptRecord.load(again.dump()).attempts) == 3, "the old record stays as it is"


def test_attempts_that_are_only_counted_are_counted_by_minutes() -> None:
    record = RecordBuilder(1, "i")
    for second in range(0, 180, 10):
        record, _ = record.plus([], OmittedAttempts(second * 1000, second * 1000 + 900, 5))
    stored = AttemptRecord.load(record.dump())
    assert len(stored.omitted) <= 4
    assert search([stored], AttemptQuery()).omitted == 90


@pytest.mark.parametrize("text", ["", "1-2", "1-2-x", "1-2-3-4", "²-1-1", "1--1", "9" * 30 + "-1-1"])
def test_a_rubbish_page_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not the id of an attempt"):
        parse_attempt_id(text)


def test_a_record_of_a_newer_version_or_rubbish_is_unreadable() -> None:
    good = RecordBuilder(1, "i").plus([attempt(1)], None)[0].dump()
    for data in (
        good.replace(b'"version":1', b'"version":2'),
        good.replace(b'"number"', b'"more":1,"number"'),
        good.replace(b"[[", b"[[1,"),
        good.replace(b'"acknowledge"', b'"celebrate"'),
        b"{}",
        b"rubbish",
    ):
        with pytest.raises(UnreadableRecord):
            AttemptRecord.load(data)


def result(number: int, *, status: int = 204) -> PushResult:
    message = DeliveredMessage(number, number, SubjectKind.MAIN, b'{"body":{"new":{"id":"k"}}}', {}, 1, None, None)
    action = Action.ACKNOWLEDGE if status < 300 else Action.RETRY
    return PushResult(message, Outcome(status=status), Decision(action), 1_767_225_600 + number / 1000)


def record(recorder: AttemptRecorder, results: Sequence[PushResult]) -> None:
    for each in results:
        recorder.record(each, "https://shop.example/in", 0.003)


async def test_the_log_has_a_bounded_size_and_successes_do_not_push_out_failures(
    pushed: PushSubscription, queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_history, "_MAX_UNWRITTEN_ATTEMPTS", 10**6)
    monkeypatch.setattr(attempt_history.AttemptBudget, "take", lambda self, now: True)
    await pushed.add("/ok")
    incarnation = (await pushed.subscriptions.get(pushed.name)).incarnation
    history = AttemptHistory(queues, flush_seconds=0.01)
    recorder = history.recorder(pushed.name, incarnation)
    record(recorder, [result(1, status=500)])
    record(recorder, [result(number) for number in range(2, 8000)])
    await history.close()
    page = await read(pushed, limit=10**6)
    kept = [each.sequence for each in page.attempts]
    assert kept[-1] == 1
    assert kept[:-1] == [*range(7999, 7999 - len(kept) + 1, -1)], "the newest are kept, without a gap"
    assert 1000 < len(kept) < 7000
    subjects = await queues.streams.subjects("KV_push-attempts", f"$KV.push-attempts.acknowledged={pushed.name}.*")
    assert len(subjects) == RECORDS_PER_RING


async def test_two_workers_write_to_one_log(pushed: PushSubscription, queues: Queues) -> None:
    await pushed.add("/ok")
    incarnation = (await pushed.subscriptions.get(pushed.name)).incarnation
    for turn in range(4):
        workers = [AttemptHistory(queues, flush_seconds=0) for _ in range(3)]
        for number, history in enumerate(workers):
            recorder = history.recorder(pushed.name, incarnation)
            begin = 1 + (turn * 3 + number) * 60
            record(recorder, [result(each) for each in range(begin, begin + 60)])
        await asyncio.gather(*(history.close() for history in workers))
    page = await read(pushed, limit=1000)
    assert sorted(each.sequence for each in page.attempts) == [*range(1, 721)]


async def test_a_log_of_a_newer_version_is_left_as_it_is_and_push_continues(
    pushed: PushSubscription, work: Work, queues: Queues, caplog: pytest.LogCaptureFixture
) -> None:
    await pushed.add("/ok")
    bucket = await queues.bucket(attempts_bucket(1))
    newer = b'{"version":2}'
    await bucket.put(f"acknowledged={pushed.name}.5", newer)
    await work()
    await pushed.write({"uuid": "ada"})
    await pushed.drained()
    await until(lambda: f"push to subscription {pushed.name} cannot be logged" in caplog.text)
    page = await read(pushed)
    assert not page.attempts
    assert page.unreadable is not None
    assert "version 2" in page.unreadable
    assert (await bucket.get(f"acknowledged={pushed.name}.5")).value == newer


async def test_at_a_high_rate_some_attempts_are_stored_and_the_others_counted(
    pushed: PushSubscription, queues: Queues
) -> None:
    await pushed.add("/ok")
    incarnation = (await pushed.subscriptions.get(pushed.name)).incarnation
    history = AttemptHistory(queues, flush_seconds=0.01)
    recorder = history.recorder(pushed.name, incarnation)
    record(recorder, [result(number) for number in range(1, 5001)])
    await history.close()
    page = await read(pushed, limit=1000)
    assert 200 <= len(page.attempts) <= 400
    assert len(page.attempts) + page.omitted == 5000
