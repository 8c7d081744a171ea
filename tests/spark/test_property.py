"""Random publishes, deletes, purges and server restarts against random batch sizes and query restarts.

Every message that was not removed is read exactly once; none is read twice; none is read that was removed before any
query could; and what is read is what was published under that sequence.
"""

import signal
from functools import partial
from random import Random

import pytest
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.jetstream.server import EmbeddedServer, ServerOptions
from purveyor.model.retries import RestartPolicy
from tests.support.broker import Broker
from tests.support.killing import restart_server
from tests.support.nats_servers import OwnServer
from tests.support.scale import chance, pick
from tests.support.spark_session import Collector, Read
from tests.support.waiting import wait_until


def _moved(query: StreamingQuery) -> bool:
    return bool(query.lastProgress) or not query.isActive


class ChangingStream:
    """A stream, and what was done to it."""

    def __init__(self, server: EmbeddedServer, random: Random) -> None:
        self.server = server
        self.broker = Broker(server.address)
        self.broker.make("S")
        self.random = random
        self.last = 0
        self.removed: set[int] = set()

    @property
    def alive(self) -> list[int]:
        return [sequence for sequence in range(1, self.last + 1) if sequence not in self.removed]

    def act(self) -> None:
        """One random thing."""
        how = self.random.random()
        if how < 0.55 or not self.alive:
            count = self.random.randrange(1, 120)
            self.broker.numbers("S", self.last + 1, self.last + count)
            self.last += count
        elif how < 0.8:
            chosen = self.random.sample(self.alive, min(len(self.alive), self.random.randrange(1, 6)))
            self.removed.update(chosen)
            self.broker.delete("S", *chosen)
        elif how < 0.93:
            upto = self.random.choice(self.alive)
            self.removed.update(sequence for sequence in self.alive if sequence < upto)
            self.broker.purge("S", seq=upto)
        else:
            self.restart()

    def restart(self) -> None:
        restart_server(self.server, signal.SIGTERM)


@pytest.mark.chaos
def test_every_message_that_was_there_is_read_once(own_server: OwnServer, follow: Read, collector: Collector) -> None:
    random = chance("random life of a stream under random queries")
    changing = ChangingStream(own_server(ServerOptions(sync="2m", restart=RestartPolicy(max_deaths=1000))), random)
    never: set[int] = set()
    """Removed while no query ran, and not read before: no query may see them."""
    for _ in range(pick(4, 25)):
        for _ in range(random.randrange(2, 6)):
            changing.act()
        never |= changing.removed - set(collector.sequences())
        options = {"maxOffsetsPerTrigger": random.randrange(20, 300), "minPartitions": random.randrange(1, 4)}
        frame = follow("S", servers=changing.broker.url, failOnDataLoss=False, idleWaitMillis=50, **options)
        query = collector.start(frame, available_now=random.random() < 0.5)
        for _ in range(random.randrange(1, 5)):
            changing.act()
        if random.random() < 0.5:
            wait_until(partial(_moved, query))
        query.stop()  # wherever it is
    changing.restart()
    collector.finish(follow("S", servers=changing.broker.url, failOnDataLoss=False))
    read = collector.sequences()
    assert len(read) == len(set(read)), "read twice"
    assert set(changing.alive) <= set(read), "not read"
    assert not set(read) & never, "read after it was removed"
    assert set(read) <= set(range(1, changing.last + 1))
    assert changing.broker.sequences("S") == changing.alive, "the test's own picture of the stream"
    assert collector.texts() == [str(sequence) for sequence in read]
