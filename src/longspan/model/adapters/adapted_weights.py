"""What an adapter adds to each weight, by which the two are merged."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from longspan.model.adapted_modules import is_adapted, is_expert_adapter, peft_modules


class AdaptedWeight(NamedTuple):
    """What peft adds to a weight: s B A of its `module`, or to each of so many `experts`, if there are any."""

    module: str
    scaling: float
    experts: int = 0
    transposed: bool = False  # an expert's matrix is (inputs, outputs)

    def added_matrix(self, matrix_a: Tensor, matrix_b: Tensor) -> Tensor:
        """Return s B A, for experts (E, …): rows of A are sorted by expert, columns of B by rank, then by expert."""
        if not self.experts:
            return self.scaling * (matrix_b @ matrix_a)
        of_experts = matrix_b.unflatten(1, (-1, self.experts)).permute(2, 0, 1)
        products = self.scaling * (of_experts @ matrix_a.unflatten(0, (self.experts, -1)))
        return products.mT if self.transposed else products


def adapted_weights(model: nn.Module) -> dict[str, AdaptedWeight]:
    """Return what peft adds to the weights of an adapted model that is not prepared or is, by qualified name."""
    adapted_by_name = dict[str, AdaptedWeight]()
    for name, module in peft_modules(model).items():
        if not is_adapted(module):
            continue
        wrapper: Any = module
        (scaling,) = wrapper.scaling.values()
        if not is_expert_adapter(module):
            adapted_by_name[f"{name}.base_layer.weight"] = AdaptedWeight(name, scaling)
            continue
        path = name
        while hasattr(model.get_submodule(path), "base_layer"):  # a matrix is adapted around another's adapter
            path += ".base_layer"
        transposed = not wrapper._did_swap_in_out_features
        adapted_by_name[f"{path}.{wrapper.parameter_name}"] = AdaptedWeight(
            name, scaling, wrapper.num_experts, transposed
        )
    return adapted_by_name
