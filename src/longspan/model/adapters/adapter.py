"""The LoRA adapter that peft has put into a model: its parameters, and what it adds to each weight.

peft is not imported: its layers are recognised by attributes. They stand in place of the linears that they adapt, so
that a prepared model's names are those of the model inside a PeftModel.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.model.adapted_modules import (
    adapter_dropout,
    belongs_to_adapter,
    is_adapted,
    is_expert_adapter,
    peft_modules,
)
from longspan.model.marks import adapter_of_prepared_model

Value = TypeVar("Value")


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model: its name in peft, its configuration (LoraConfig), and its modules' largest dropout.

    Trainers of preferences set dropout to 0 in the modules, so that it may differ from the configuration's.
    """

    name: str
    config: Any
    dropout: float = 0.0


def find_adapter(model: nn.Module) -> Adapter | None:
    """Find the adapter in a model; None without peft's modules. ModelError for several, and without a configuration."""
    if not peft_modules(model):
        return None
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    if len(configs) != 1:
        raise ModelError(
            f"{type(model).__name__} has {len(configs)} adapters ({', '.join(configs) or 'none is configured'}), and "
            "one is trained; keep one: peft_model.delete_adapter(name)"
        )
    ((name, config),) = configs.items()
    return Adapter(name, config, adapter_dropout(model))


def entries_trained_with_adapter(model: nn.Module, entries: Mapping[str, Value]) -> dict[str, Value]:
    """Select the values of what is trained with an adapter, by weight name; all of them without an adapter."""
    if adapter_of_prepared_model(model) is None:
        return dict(entries)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in entries.items() if belongs_to_adapter(name) or name in trained}


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapter's parameters by name."""
    return ((name, p) for name, p in model.named_parameters() if belongs_to_adapter(name))


class AdaptedWeight(NamedTuple):
    """What peft adds to a weight: s B A with the matrices of its `module`, or one such product for each expert."""

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
    """Return what peft adds to the weights of an adapted model, prepared or not, by qualified name."""
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
        # adapters of several matrices of one module are nested: the matrix is in the innermost `base_layer`
        while hasattr(model.get_submodule(path), "base_layer"):
            path += ".base_layer"
        transposed = not wrapper._did_swap_in_out_features
        adapted_by_name[f"{path}.{wrapper.parameter_name}"] = AdaptedWeight(
            name, scaling, wrapper.num_experts, transposed
        )
    return adapted_by_name
