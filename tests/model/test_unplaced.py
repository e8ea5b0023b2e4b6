"""Parameters inside split blocks that the plan does not name: summed where that is right, else refused by name."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.model.tensor_parallel.plan import COLWISE, PACKED, PARTIAL_GRADIENT, list_partial_gradients, list_styles
from tests.model.stock import tiny


class Gain(nn.Module):
    """One learnt number on every feature."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Normed(Gain):
    """The same after a norm over all features."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.square().mean(-1, keepdim=True).sqrt())


def _activation(mlp: nn.Module, activation: nn.Module) -> None:
    mlp.act_fn = activation


def _gain_of_the_sum(mlp: nn.Module) -> None:
    inner, gain = mlp.forward, Gain()
    mlp.gain, mlp.forward = gain, lambda x: gain(inner(x))


def _gain_of_the_input(mlp: nn.Module) -> None:
    inner, gain = mlp.forward, Gain()
    mlp.gain, mlp.forward = gain, lambda x: inner(gain(x)) + gain(x)


def _number_of_the_block(mlp: nn.Module) -> None:
    inner = mlp.forward
    mlp.gain = nn.Parameter(torch.ones(1))
    mlp.forward = lambda x: inner(x) * mlp.gain


REFUSED: dict[str, Callable[[nn.Module], None]] = {
    "gain": lambda mlp: _activation(mlp, Normed()),
    "weight": lambda mlp: _activation(mlp, nn.RMSNorm(48)),
    "gain of the sum": _gain_of_the_sum,
    "gain of the input": _gain_of_the_input,
    "gain of the block": _number_of_the_block,
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_parameter_whose_gradient_would_not_be_a_sum_is_refused(case: str) -> None:
    model = tiny("llama")
    REFUSED[case](model.get_submodule("model.layers.1.mlp"))
    says = rf"model.layers.1.mlp.\w*\.?{case.partition(' ')[0]} \(\w+\) is not in the .* plan of LlamaForCausalLM"
    with pytest.raises(ModelError, match=says):
        list_partial_gradients(model, list_styles(model))


def test_a_parameter_of_attention_is_refused() -> None:
    model = tiny("llama")
    model.get_submodule("model.layers.0.self_attn").gain = nn.Parameter(torch.ones(4))
    with pytest.raises(ModelError, match=r"model.layers.0.self_attn.gain \(LlamaAttention\)"):
        list_partial_gradients(model, list_styles(model))


def test_a_learnt_activation_between_packed_and_row_wise_linears_is_refused() -> None:
    model = tiny("llama")
    _activation(model.get_submodule("model.layers.0.mlp"), Gain())
    styles = [x._replace(style=PACKED) if ".mlp." in x.name and x.style == COLWISE else x for x in list_styles(model)]
    with pytest.raises(ModelError, match=r"model.layers.0.mlp.act_fn.gain \(Gain\) is not in the .* plan"):
        list_partial_gradients(model, styles)


@pytest.mark.parametrize("shared", [False, True])
def test_a_learnt_activation_is_summed_once(shared: bool) -> None:
    model, gain = tiny("llama"), Gain()
    for i in range(2):
        _activation(model.get_submodule(f"model.layers.{i}.mlp"), gain if shared else Gain())
    entries = list_partial_gradients(model, list_styles(model))
    assert [entry.name for entry in entries] == [f"model.layers.{i}.mlp.act_fn.gain" for i in range(2 - shared)]
    assert all(entry.style == PARTIAL_GRADIENT and entry.parameter == "gain" for entry in entries)
    assert not gain.gain.is_meta and gain.gain.grad is None


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "deepseek-v3"])
def test_plans_that_name_everything_add_nothing(family: str) -> None:
    model = tiny(family)
    assert list_partial_gradients(model, list_styles(model)) == []
