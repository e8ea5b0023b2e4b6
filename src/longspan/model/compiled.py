"""Norms and MLPs of decoder layers under torch.compile; attention, FSDP2's hooks and checkpoints stay as they are."""

from transformers import PreTrainedModel

from longspan.model.layers import decoder_layers
from longspan.model.mtp.depths import depths_of
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.forwards.fused_norms import runs_in_one_pass


def compile_layers(model: PreTrainedModel | PipelineModel) -> None:
    """Compile the norms and MLPs inside a prepared model's decoder layers, in place, for any number of rows.

    Norms that run by a kernel of our own are left as they are.
    """
    stages = [stage.model for stage in model.stages] if isinstance(model, PipelineModel) else [model]
    for layer in (layer for stage in stages for layer in (*decoder_layers(stage).values(), *depths_of(stage))):
        for inner in layer.modules():
            if type(inner).__name__.endswith(("RMSNorm", "MLP")) and not runs_in_one_pass(inner):
                inner.compile(dynamic=True)
