"""The receive buffer of a link: filled by the socket at its end, used up by the frame cutter from its start."""

import numpy as np

from purveyor.jetstream.bulk.arrow_bytes import Bytes

SIZE = 4 << 20
_LEAST_ROOM = 64 << 10


class ReceiveBuffer:
    """One block of memory that is used again and again; it grows for a frame that is larger than it is."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._block = np.empty(size, np.uint8)
        self._start = 0
        self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def filled(self) -> Bytes:
        """What was received and not yet dropped; valid until `room` is asked for."""
        return self._block[self._start : self._end]

    def room(self, wanted: int = 0) -> memoryview:
        """Where to receive into; large enough that what is there can grow to `wanted` bytes."""
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._block) > self._size and wanted <= self._size:
                self._block = np.empty(self._size, np.uint8)
        needed = max(wanted - len(self), _LEAST_ROOM)
        if len(self._block) - self._end < needed:
            block = self._block
            if len(self) + needed > len(block):
                block = np.empty(len(self) + needed, np.uint8)
            rest = self.filled()
            block[: len(rest)] = rest if block is not self._block else rest.copy()
            self._block, self._start, self._end = block, 0, len(rest)
        return self._block.data[self._end :]

    def received(self, count: int) -> None:
        """So many bytes were written into the room."""
        self._end += count

    def drop(self, count: int) -> None:
        """So many bytes from the start are done with."""
        self._start += count

    def clear(self) -> None:
        """Forget all of it."""
        self._start = self._end = 0
