"""The rules of the transform on messages in memory, one after the other."""

from datetime import UTC, datetime

from purveyor.model.event import Event
from purveyor.pipeline.transform import load_mapping
from purveyor.pipeline.transform.live_directory import LiveDirectory
from purveyor.pipeline.transform.record_transform import Message, Output, TransformRules, transform
from purveyor.queues.dead_letters.letter import DeadLetter
from tests.pipeline.transform.memory import MemoryPages, MemoryStore

ADA = "uid=ada,dc=e"
MOMENT = datetime(2026, 11, 15, 12, tzinfo=UTC)


class Transformer:
    """Messages one after the other, from sequence 1 on."""

    def __init__(self, max_payload: int = 1 << 20, mapping: str = "plain") -> None:
        self.store = MemoryStore()
        self.directory = LiveDirectory(self.store, MemoryPages())
        self.rules = TransformRules(load_mapping(mapping), max_payload)
        self.sequence = 0

    def outputs(self, data: bytes, headers: dict[str, tuple[str, ...]] | None = None) -> list[Output]:
        self.sequence += 1
        message = Message(self.sequence, MOMENT, "ldif.people", headers or {}, data)
        return list(transform(self.directory, self.rules, message))

    def events(self, data: bytes) -> list[Event]:
        outputs = self.outputs(data)
        assert not any(output.parked for output in outputs)
        return [Event.decode(output.data) for output in outputs]

    def letter(self, data: bytes) -> str:
        (output,) = self.outputs(data)
        assert output.parked
        assert output.data == data
        return DeadLetter.from_message(output.headers, output.data).reason
