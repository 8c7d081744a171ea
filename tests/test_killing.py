"""A test kills the embedded server also while its supervisor is still starting it."""

from purveyor.jetstream.server import RestartPolicy, ServerOptions
from tests.support.killing import kill_server, restart_server
from tests.support.nats_servers import OwnServer
from tests.support.waiting import wait_until


def test_a_server_that_is_being_restarted_is_killed_once_it_runs(own_server: OwnServer) -> None:
    slow = RestartPolicy(first_pause_seconds=0.3)
    server = own_server(ServerOptions(sync="2m", restart=slow))
    kill_server(server)
    kill_server(server)
    wait_until(lambda: server.restarts == 2)
    restart_server(server)
    assert server.restarts == 3
