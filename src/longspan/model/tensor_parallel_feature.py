"""Tensor parallelism as a feature of `prepare`: refused, tried on the host, and layers split over a slot's ranks."""

from torch import nn
from transformers import PreTrainedModel

from longspan.model.exactness.split_trial import refuse_mixed_features
from longspan.model.features import Feature
from longspan.model.tensor_parallel.module_styles import list_styles
from longspan.model.tensor_parallel.split_model import refuse_tensor_parallel, split_over_ranks


class TensorParallelFeature(Feature):
    """Layers split over the tensor-parallel ranks of a slot, with or without rows split between them."""

    def refuse(self, model: PreTrainedModel) -> None:
        """Raise ModelError for a model that cannot be split exactly, also by a trial on the host."""
        refuse_tensor_parallel(model, self.world, sequence_parallel=self.options.sequence_parallel)
        refuse_mixed_features(model, list_styles(model))

    def place(self, model: PreTrainedModel, root: nn.Module) -> None:
        """Split a part of the model over the ranks of this slot."""
        split_over_ranks(
            model,
            self.world,
            sequence_parallel=self.options.sequence_parallel,
            sum_expert_gradients=not self.options.shard_parameters,
        )
