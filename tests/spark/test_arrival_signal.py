"""The server wakes an idle reader: at each new message, also after a broken connection, if its user may subscribe."""

import pickle

from purveyor.jetstream.address import Address
from purveyor.jetstream.server import ServerOptions, find_running_server
from purveyor.jetstream.server.config import Permissions
from purveyor.spark.arrival_signal import ArrivalSignal, ArrivalWait
from tests.support.broker import Broker
from tests.support.nats_servers import OwnServer
from tests.support.proxy import TcpProxy
from tests.support.waiting import wait_until


def publish_until_signalled(broker: Broker, subject: str, signal: ArrivalSignal) -> None:
    """Publish until a signal comes: the server may take a first message before it has the subscription."""

    def is_signalled() -> bool:
        broker.add(subject, ["one", "two"])
        return signal.wait(0.1)

    wait_until(is_signalled, what="a signal")


def test_the_next_message_ends_the_wait_and_only_the_next(broker: Broker, unique: str) -> None:
    broker.make(unique)
    signal = ArrivalSignal(broker.address)
    subjects = (unique, f"{unique}.>")
    assert signal.arm(subjects)
    assert signal.is_armed(subjects)
    publish_until_signalled(broker, f"{unique}.a", signal)
    assert not signal.is_armed(subjects), "the server ended this subscription with the first message"
    assert signal.is_armed((unique,)), "no message came on the other subject"
    assert signal.arm(subjects)
    publish_until_signalled(broker, unique, signal)
    signal.close()


def test_what_came_before_it_was_armed_again_is_no_signal(broker: Broker, unique: str) -> None:
    broker.make(unique)
    signal = ArrivalSignal(broker.address)
    assert signal.arm((unique,))
    publish_until_signalled(broker, unique, signal)
    broker.add(unique, ["three"])
    assert signal.arm((unique,))
    assert not signal.wait(0.2)
    signal.close()


def test_a_user_who_may_not_subscribe_polls(own_server: OwnServer) -> None:
    poller = Permissions(user="poller", purpose="reads a stream", publish=("$JS.API.>",))
    server = own_server(ServerOptions(sync="2m", users=(poller,)))
    address = find_running_server(server.directory, poller.user)
    assert address is not None
    signal = ArrivalSignal(address)
    wait_until(lambda: signal.wait(0.01) or not signal.arm(("S",)), what="the refusal")
    assert not signal.arm(("S",)), "it does not ask again"


def test_after_a_broken_connection_the_signal_comes_again(broker: Broker, unique: str) -> None:
    broker.make(unique)
    with TcpProxy(*broker.address.hosts()[0]) as proxy:
        signal = ArrivalSignal(proxy.address(broker.address))
        assert signal.arm((unique,))
        proxy.refuse()
        wait_until(lambda: not signal.wait(0.01) and not signal.is_armed((unique,)), what="the lost connection")
        proxy.restore()
        wait_until(lambda: signal.wait(0.01) or signal.arm((unique,)), what="a new connection")
        publish_until_signalled(broker, unique, signal)
        signal.close()


def test_a_copy_for_an_executor_has_no_connection(address: Address) -> None:
    waiting = ArrivalWait(address)
    waiting.pause((), 0.001)
    copy = pickle.loads(pickle.dumps(waiting))
    copy.pause((), 0.001)
    copy.close()
