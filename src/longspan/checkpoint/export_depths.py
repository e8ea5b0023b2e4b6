"""The depths of multi-token prediction of an exported model: under which names they are written, or left out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from transformers import PreTrainedModel

from longspan.comm.all_ranks import LogLine
from longspan.config.sections import RunConfig
from longspan.errors import counted
from longspan.model.mtp.add_depths import add_mtp
from longspan.model.mtp.depths import mtp_blocks
from longspan.model.mtp.names import PREFIX, to_published_names

Value = TypeVar("Value")
MtpNames = Literal["published", "own", "none"]
"""published: as models of the family are published, own where there is no such name; own: mtp.layers.0 and so on."""


@dataclass(frozen=True)
class ExportedDepths:
    """What becomes of the depths of a run's model in its files: `rename` is from our names to theirs."""

    rename: Callable[[str], str]
    left_out: bool = False

    @classmethod
    def of(cls, run: RunConfig, empty: PreTrainedModel, names: MtpNames, log: LogLine) -> "ExportedDepths":
        """Give the stock model the depths that are written, and say what becomes of them; nothing of a run without."""
        depths, text = run.mtp.depths, empty.config.get_text_config()
        own = cls(lambda name: name, left_out=names == "none")
        if not depths:
            return own
        what = f"{counted(depths, 'depth')} of multi-token prediction"
        if own.left_out:
            log(f"{what}: left out")
            return own
        blocks: list[Any] = [*mtp_blocks(add_mtp(empty, depths)).values()]
        blocks = blocks[: len(blocks) // depths]
        published = to_published_names(text.model_type, text.num_hidden_layers, depths, len(blocks))
        rename = published if names == "published" else None
        if rename is None:
            log(f"{what}: under {PREFIX}.layers.0.… and so on, which longspan reads and stock transformers leaves out")
            return own
        config: Any = text
        config.num_nextn_predict_layers = depths
        if len(blocks) > 1:
            config.mtp_layers_block_type = [block.block_type for block in blocks]
        log(f"{what}: under the names of published {text.model_type} models, {rename(f'{PREFIX}.layers.0.eh_proj.…')}")
        return cls(rename)

    def kept(self, weights: Mapping[str, Value]) -> dict[str, Value]:
        """Of values by the names of a checkpoint's weights those that are written."""
        return {name: x for name, x in weights.items() if not (self.left_out and name.startswith(f"{PREFIX}."))}
