"""The one answer to "may this model run?": `check_model`, which `prepare` calls, and `try_rows` before the first step.

Everything that refuses a model for what it computes is called from here, or named in the list of `check_model`. Where
a model's parts lie (sizes, homes, schedules) is checked where they are placed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from longspan.attention import AttendCall
from longspan.errors import ModelError
from longspan.model.adapters import Adapter, find_adapter
from longspan.model.exactness.adapter_rules import check_adapter, check_equal_adapters
from longspan.model.exactness.class_trial import refuse_class
from longspan.model.exactness.declared_rules import refuse_unsupported
from longspan.model.layers import has_experts, innermost_decoder
from longspan.model.mtp.depths import replace_copied_depths
from longspan.model.seams.call_rules import is_prepared
from longspan.model.seams.meta_pass import check_kernel, record_model
from longspan.model.sharding import Placement


@dataclass(frozen=True)
class Evidence:
    """What the checks of a model found: its adapter, the calls of its layers, its random draws in words.

    `draws` are those of training outside attention, `draws_in_evaluation` those of evaluation; most models have none.
    `calls` is empty for a model that was not probed.
    """

    adapter: Adapter | None
    calls: tuple[AttendCall, ...]
    draws: tuple[str, ...]
    draws_in_evaluation: tuple[str, ...]


def check_model(
    model: nn.Module,
    placement: Placement,
    connect: Callable[[PreTrainedModel], None],
    *,
    stages: int,
    kernel: str | None,
    probe: bool,
) -> Evidence:
    """Raise ModelError, naming layers and settings, for a model that cannot run exactly over a sharded sequence.

    `connect` makes the model's attention, mixers and experts call longspan. In order:

    1. Declared, before anything is changed. Its configuration and modules (`declared_rules.py`): an architecture,
       outputs, forwards, rotary types, layer types and convolutions that are known to be exact.
    2. A small copy of its class, if the class has experts or is not transformers' own (`class_trial.py`): numbers on
       the host show whether rows influence each other outside attention.
    3. Its adapter, and its placement under the home (`adapter_rules.py`, `placement`). That includes shared layers, and
       blocks whose features would be split (`tensor_parallel/split_trial.py`); ranks compare their adapters.
    4. A pass of the connected model on the meta device (`seams/meta_pass.py`), and one more if it draws: every
       layer reaches attention, for calls that the kernel can do. They also record random draws outside attention, for
       which training is refused when it is tried (`seams/call_rules.py`). Without `probe` the first pass over a shard
       shows the layers that do not reach attention (`seams/meta_pass.py`).
    5. The model itself, placed, before its first step or call in training and in evaluation mode: `try_rows` runs a few
       rows next to others, and compares (`row_trial.py`).

    Parts that only some models have are tried where they are made: the layer that depths of multi-token prediction copy
    (`add_depths.py`, on the meta device), images and videos (`image_trial.py`, a small copy whole and in parts), an
    encoder under tensor parallelism (`tensor_parallel/split_trial.py`, its first call), pipeline stages and the loss by
    rows (on the meta device, in `pipeline/stages.py` and `seams/forwards/row_loss.py`).
    """
    if is_prepared(model):
        raise ModelError(f"this {type(model).__name__} was prepared already; prepare a model once")
    with replace_copied_depths(model):
        refuse_unsupported(model)
        assert isinstance(model, PreTrainedModel)  # others were refused
        class_draws = refuse_class(model) if needs_class_trial(model) else ()
        adapter = find_adapter(model)
        if adapter is not None:
            check_adapter(model, adapter, placement.world)
        placement.check_placement(model, stages)
        if adapter is not None:  # last, as it compares ranks, each of which has passed its own checks
            check_equal_adapters(model, placement.world)
    connect(model)
    record = record_model(model, class_draws, probe=probe)
    device, dtype = placement.world.device, placement.dtype_of(model)
    calls = check_kernel(model, kernel, record.calls, device=device, dtype=dtype)
    return Evidence(adapter, calls, record.draws, record.draws_in_evaluation)


def needs_class_trial(model: PreTrainedModel) -> bool:
    """Whether a small copy of the class is tried: of one with experts, or that is not transformers' own."""
    return has_experts(model) or not type(innermost_decoder(model)).__module__.startswith("transformers.")
