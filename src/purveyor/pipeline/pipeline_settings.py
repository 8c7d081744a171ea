"""The settings of the pipeline: which parts run, and on what."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from purveyor.jetstream.address import Address
from purveyor.model.errors import InvalidConfig
from purveyor.pipeline.transform.mapping_file import DEFAULT_MAPPING
from purveyor.queues.catalogue import DEFAULT_GROUP


class PartName(Enum):
    """The names of the parts."""

    TRANSFORM = "transform"
    DISPATCH = "dispatch"
    ARCHIVE = "archive"
    PREFILL = "prefill"


ALL_PARTS = tuple(PartName)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """Which parts run, and on what."""

    data_dir: Path
    find_address: Callable[[], Address] = field(repr=False)
    """Returns the address of the server: an embedded one may come back at another port."""
    parts: tuple[PartName, ...] = ALL_PARTS
    master: str = "local[*]"
    group: str = DEFAULT_GROUP
    mapping: str | Path = DEFAULT_MAPPING
    """The name of a built-in mapping of directory entries, or a TOML file."""
    archive_seconds: float = 2.0
    replicas: int = 1
    migrate: bool = True
    """Migrate a queue that exists in another shape, instead of giving up."""
    wait: bool = True
    """Wait while another process runs these parts, instead of giving up."""
    warm_up: bool = True
    """Whether a pipeline that is not a standby warms up before it is ready. A standby always does."""
    is_rehearsal: bool = False
    """Whether the parts only warm up, on queues of their own: then they leave no traces."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise InvalidConfig("no part of the pipeline is chosen", fix=f"choose from {_names(ALL_PARTS)}")

    def checkpoint(self, part: PartName) -> Path:
        """Return the checkpoint directory of a part."""
        return self.data_dir / "checkpoints" / self.checkpoint_name(part)

    def checkpoint_name(self, part: PartName) -> str:
        """Return the name of a part's checkpoint. Dispatch has one for each group."""
        return f"{part.value}-{self.group}" if part is PartName.DISPATCH else part.value

    @property
    def locked_checkpoints(self) -> list[str]:
        """The checkpoints that only one process may use. Prefill workers share a queue and need none."""
        return [self.checkpoint_name(part) for part in self.parts if part is not PartName.PREFILL]

    @property
    def label(self) -> str:
        """Distinguishes this pipeline from others on the same data; empty for the usual one."""
        group = [] if self.group == DEFAULT_GROUP else [self.group]
        return "-".join(group if set(self.parts) == set(ALL_PARTS) else [*group, *(part.value for part in self.parts)])


def _names(parts: Sequence[PartName]) -> str:
    return ", ".join(part.value for part in parts)
