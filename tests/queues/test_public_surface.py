"""The public surface is what it says: every name leads somewhere, and nothing heavy is loaded before it is used."""

import subprocess
import sys

import purveyor.queues


def test_every_public_name_can_be_had() -> None:
    for name in purveyor.queues.__all__:
        assert getattr(purveyor.queues, name).__class__


def test_the_lazy_table_and_the_list_agree() -> None:
    assert set(purveyor.queues._HOME_OF) == set(purveyor.queues.__all__)


def test_importing_the_queues_loads_neither_client_nor_arrow() -> None:
    code = "import purveyor.queues, sys; print([m for m in ('nats', 'pyarrow', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_executor_that_reads_ranges_does_not_load_the_async_client() -> None:
    code = (
        "from purveyor.queues import read_range, publish_many; import purveyor.spark, sys; print('nats' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
