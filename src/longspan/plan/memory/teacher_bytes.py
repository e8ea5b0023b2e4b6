"""What a teacher adds to the memory of a run: its weights, its forward pass, and what of it meets the model's loss."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from longspan.layout import Layout
from longspan.plan.form import FrozenWeights
from longspan.plan.memory.layer_table import LayerTable, SlotLoad
from longspan.plan.memory.model_numbers import ModelNumbers, make_stages
from longspan.plan.memory.settings import MemorySettings
from longspan.plan.memory.stage_bytes import StageBytes
from longspan.plan.shape.config_reader import ConfigReader

# An adapter of no linear: then all weights are frozen.
_NOTHING_TRAINED: dict[str, Any] = {"lora_rank": 1, "lora_targets": ("",), "state_numbers": 0.0}
# Rows as wide as the model that a layer holds beside what it makes: its input, the sum behind attention, its output.
_ROWS = 3


@dataclass(frozen=True, eq=False)
class PlannedTeacher:
    """A teacher as plans count it, the field `teacher` of MemorySettings: its configuration, as of `MemoryPlan.of`, how
    its weights lie, and the bytes of a number.
    """

    config: Any
    frozen: FrozenWeights = "whole"
    number_bytes: int = 2
    offload_weights: bool = False
    _counted: dict[Any, "TeacherBytes"] = field(default_factory=dict[Any, "TeacherBytes"], repr=False)

    def on(self, home: Layout, settings: MemorySettings) -> "TeacherBytes":
        """Return its bytes on a rank of a home, counted once. Raises PlanError for a model that cannot be counted."""
        key = home, settings.gpu, settings.free, settings.compiled, settings.mlp_tile_tokens
        if key not in self._counted:
            self._counted[key] = TeacherBytes(self, home, settings)
        return self._counted[key]


class TeacherBytes:
    """The bytes of a teacher on one rank, beside those of the model that learns from it."""

    def __init__(self, teacher: PlannedTeacher, home: Layout, settings: MemorySettings) -> None:
        self._settings = MemorySettings(
            **_NOTHING_TRAINED,
            parameter_bytes=teacher.number_bytes,
            compute_bytes=teacher.number_bytes,
            frozen=teacher.frozen,
            offload_weights=teacher.offload_weights,
            mlp_tile_tokens=settings.mlp_tile_tokens,
            compiled=settings.compiled,
            gpu=settings.gpu,
            free=settings.free,
        )
        self._home = home
        self._read = ConfigReader.read_language_model(teacher.config)
        self._numbers = ModelNumbers.from_configuration(teacher.config, home, self._settings)
        stage = make_stages(self._numbers, home, self._settings)[0]
        self._place = StageBytes(self._read, home, self._settings, self._numbers, stage)

    @property
    def vocabulary(self) -> int:
        return self._numbers.vocabulary

    def weights(self, *, on_host: bool) -> tuple[int, int]:
        """Return the bytes of its shards of whole and of packed weights on the host, or of those on the device."""
        numbers = self._place.stage.all
        whole = self._place.weight_bytes(numbers, on_host=on_host)
        return int(whole), int(self._place.packed_bytes(numbers, on_host=on_host))

    @cached_property
    def _whole(self) -> list[float]:
        return [layer.whole * self._settings.compute_bytes for layer in self._numbers.layers]

    @property
    def always_gathered(self) -> float:
        """Bytes of weights that are whole through a step: in free mode all, packed ones too."""
        root = self._place.stage.root.whole * self._settings.compute_bytes
        return sum(self._whole) + root if self._settings.free else 0.0

    @property
    def gathered_in_pass(self) -> float:
        """Bytes of what its pass gathers besides: two layers, what comes from the host, and embedding or head."""
        if self._settings.free:
            return 0.0
        largest = max(self._whole)
        packed = max(layer.packed_bytes for layer in self._numbers.layers)
        return 2 * largest + packed + self._place.staging_bytes + self.gathered_head

    @property
    def gathered_head(self) -> float:
        """Bytes of the head, which the loss gathers; in free mode it is whole already."""
        return 0.0 if self._settings.free else self._numbers.head.whole * self._settings.compute_bytes

    def work(self, load: SlotLoad) -> float:
        """Return the bytes that its pass over a load holds in the layer that holds most."""
        table = LayerTable(self._read, self._settings, load, self._home.tp, self._home.ep)
        parts = (part for kind in dict.fromkeys(self._numbers.kinds) for part in table.mixing_and_mlp_parts(kind))
        return _ROWS * table.input_bytes + max(part.saved for part in parts)

    def rows(self, load: SlotLoad) -> float:
        """Return the bytes of its last hidden states, which stay until the loss, if each row has a target."""
        return load.rows * self._place.hidden_row_bytes
