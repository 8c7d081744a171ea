"""Every public name can be imported, and nothing heavy is loaded before it is used."""

import subprocess
import sys
from types import ModuleType

import pytest

import purveyor.jetstream
import purveyor.queues

PACKAGES = pytest.mark.parametrize("package", [purveyor.jetstream, purveyor.queues], ids=lambda each: each.__name__)


@PACKAGES
def test_every_public_name_can_be_imported(package: ModuleType) -> None:
    for name in package.__all__:
        assert getattr(package, name).__class__


@PACKAGES
def test_the_lazy_table_and_the_list_agree(package: ModuleType) -> None:
    assert set(package._MODULE_OF) == set(package.__all__)


def test_the_public_names() -> None:
    assert set(purveyor.queues.__all__) == {
        "Ensured",
        "Queue",
        "QueueStatus",
        "Queues",
        "Reader",
        "connect",
        "incoming",
        "internal_queues",
        "stage_queue",
        "subscription_queue",
    }
    assert set(purveyor.jetstream.__all__) == {
        "Ack",
        "AckPolicy",
        "AckSample",
        "Address",
        "AppendOptions",
        "Bucket",
        "BucketConfig",
        "Compression",
        "ConsumerConfig",
        "ConsumerInfo",
        "Deliver",
        "Discard",
        "EmbeddedServer",
        "Entry",
        "Expect",
        "JetStream",
        "Message",
        "Operation",
        "Outcome",
        "Outgoing",
        "PublishMode",
        "PublishOptions",
        "PublishReport",
        "PullOptions",
        "ReadOptions",
        "Receipt",
        "Refusal",
        "RefusalKind",
        "Replay",
        "Retention",
        "Route",
        "ServerOptions",
        "Storage",
        "StoredMessage",
        "StreamConfig",
        "StreamInfo",
        "StreamState",
        "Target",
        "Tls",
        "append_once",
        "connect",
        "newest_position",
        "outgoing",
        "publish_many",
        "read_range",
        "stored_size",
    }


@PACKAGES
def test_importing_a_package_loads_neither_client_nor_arrow(package: ModuleType) -> None:
    code = f"import {package.__name__}, sys; print([m for m in ('nats', 'pyarrow', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_executor_that_reads_ranges_does_not_load_the_async_client() -> None:
    code = (
        "from purveyor.jetstream import read_range, publish_many; import purveyor.spark, sys; "
        "print('nats' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
