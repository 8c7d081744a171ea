"""The bell of a subscription, as a push worker hears it: it calls, and nobody has to wait for it."""

from collections.abc import Callable

from purveyor.delivery.notifier import Bell
from purveyor.jetstream.connection import Connection


class Ear(Bell):
    """See the module. `rang` tells whether it did since somebody last looked."""

    def __init__(self, connection: Connection, name: str, heard: Callable[[], None]) -> None:
        super().__init__(connection, name)
        self._call = heard
        self.rang = False

    def ring(self) -> None:
        """There may be something new."""
        self.rang = True
        self._call()
