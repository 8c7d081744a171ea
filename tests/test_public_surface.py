"""The public names of `purveyor` and `purveyor.stages`: a change of them is a change for users."""

import subprocess
import sys

import purveyor
import purveyor.stages


def test_the_public_names_of_the_package() -> None:
    assert set(purveyor.__all__) == {
        "Batch",
        "Consumer",
        "ConsumerOptions",
        "Event",
        "EventsRefused",
        "Message",
        "Published",
        "PublishedMany",
        "Publisher",
        "PublisherOptions",
        "RefusedEvent",
        "__version__",
    }
    for name in purveyor.__all__:
        assert getattr(purveyor, name) is not None


def test_the_public_names_of_stages() -> None:
    assert set(purveyor.stages.__all__) == {
        "Context",
        "Endpoint",
        "Goto",
        "Next",
        "Refuse",
        "Reply",
        "Request",
        "Retry",
        "SqlStore",
        "Stages",
        "SubscriptionPull",
        "SubscriptionSource",
        "Target",
    }
    for name in purveyor.stages.__all__:
        assert getattr(purveyor.stages, name).__class__


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    assert not hasattr(purveyor, "consumer_of")


def test_importing_the_package_loads_no_library() -> None:
    code = (
        "import purveyor, sys\n"
        "print([name for name in ('aiohttp', 'nats', 'pyarrow', 'sqlalchemy') if name in sys.modules])\n"
        "purveyor.Consumer\n"
        "print([name for name in ('nats', 'pyarrow', 'sqlalchemy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]
