"""Optimizers by name: which class, with which arguments, over which parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from longspan.config.sections import OptimizerSection
from longspan.config.text_values import read_arguments
from longspan.errors import ConfigError
from longspan.train.optim.eight_bit_adamw import EightBitAdamW
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.optim.optimizer_classes import KEYS_OF_ARGUMENTS, check_optimizer_arguments, optimizer_class
from longspan.train.optim.parameter_groups import parameter_groups
from longspan.train.optim.stochastic_rounding import RoundingBits

EIGHT_BIT_NEEDS = "which adamw with betas, eps and maximize alone has"
_ONE_PASS = {"betas", "eps", "maximize"}  # arguments that `OnePassAdamW` takes
BETAS = (0.9, 0.95)  # adamw's and muon's, where optimizer.arguments has none
_WITH_BETAS = ("adamw", "muon")


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer's class and what it is called with.

    >>> choice = OptimizerChoice.from_section(OptimizerSection(class_="torch.optim.NAdam"))
    >>> optimizer = choice.build(parameter_groups(model, choice.weight_decay))
    """

    name: str
    lr: float = 1e-3
    weight_decay: float = 0.0
    # These are arguments other than lr and weight_decay.
    arguments: tuple[tuple[str, Any], ...] = ()
    moments: str = ""  # adamw's: in the dtype of parameters, or "8bit"

    @classmethod
    def from_section(cls, optimizer: OptimizerSection) -> "OptimizerChoice":
        """Read the choice of [optimizer].

        Raises ConfigError for a class that cannot train, and for an argument that has a key of its own, or that the
        class does not take.
        """
        given = read_arguments("optimizer.arguments", optimizer.arguments)
        for key in KEYS_OF_ARGUMENTS.keys() & given.keys():
            raise ConfigError(f"optimizer.arguments has {key}, which is {KEYS_OF_ARGUMENTS[key]}")
        check_optimizer_arguments(optimizer.class_, given)
        arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        if optimizer.class_ in _WITH_BETAS:
            arguments = {"betas": BETAS} | arguments
        settings = tuple(arguments.items())
        return cls(optimizer.class_, optimizer.lr, optimizer.weight_decay, settings, optimizer.moments)

    @property
    def is_one_pass(self) -> bool:
        """Whether longspan's AdamW in one pass is made, and not torch's: all its arguments are known there."""
        return self.name == "adamw" and {name for name, _ in self.arguments} <= _ONE_PASS

    def build(self, parameters: Iterable[Any], *, rounding: RoundingBits | None = None) -> Optimizer:
        """Make the optimizer of parameters, or of groups of them. Raises ConfigError where its class refuses these.

        With `rounding`, AdamW in one pass rounds parameters and moments in bfloat16 by chance.
        """
        assert rounding is None or self.is_one_pass, self.name  # `check_optimizer` refuses others
        settings: dict[str, Any] = {"lr": self.lr, **dict(self.arguments)}
        try:
            if self.is_one_pass:
                kind = EightBitAdamW if self.moments else OnePassAdamW
                return kind(parameters, **settings, rounding=rounding)
            if self.name == "adamw":  # torch's own, as its arguments ask for
                settings = {"fused": True} | settings
            return optimizer_class(self.name)(parameters, **settings)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"optimizer.class {self.name!r} refuses its parameters or arguments {settings}: {error}; correct "
                "optimizer.arguments, or use adamw"
            ) from error


def build_optimizer(
    model: nn.Module,
    name: str = "adamw",
    lr: float | Mapping[str, float] = 1e-3,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = BETAS,
    moments: Literal["", "8bit"] = "",
    **arguments: Any,
) -> Optimizer:
    """Build an optimizer over the model's trainable parameters; call it after `prepare`, which may replace them.

    >>> optimizer = build_optimizer(model, lr={"encoders.image": 1e-4, "language_model": 1e-5})

    "adamw" (in one pass; torch's with arguments that only it has, such as amsgrad or fused), "sgd" (no momentum unless
    given), "muon" (see `is_layer_matrix`), or the dotted name of a class, such as "torch.optim.NAdam". `lr` is one
    learning rate, or those of modules by name: a parameter has that of the innermost module that is named. `betas` are
    adamw's and muon's, `moments="8bit"` adamw's; `arguments` are the class's own. Weight decay applies to matrices and
    kernels of convolutions (see `has_weight_decay`), not to norms and biases. If the model has nothing to train (a
    frozen pipeline stage, say), the optimizer has no parameters.

    Raises ConfigError for another name, for arguments that the class does not take, for a rate whose name is not a
    module, for parameters without a rate, and for muon without a matrix to train.
    """
    if name in _WITH_BETAS:
        arguments = {"betas": betas} | arguments
    check_optimizer_arguments(name, arguments)
    rates = lr if isinstance(lr, Mapping) else {"": lr}
    groups = parameter_groups(model, name, weight_decay, rates)
    settings = tuple(arguments.items())
    choice = OptimizerChoice(name, max(rates.values(), default=0.0), weight_decay, settings, moments)
    if moments and not choice.is_one_pass:
        raise ConfigError(f"moments is {moments!r}, {EIGHT_BIT_NEEDS}; the optimizer is {name!r} with {arguments}")
    return choice.build(groups)


def allocate_adam_states(optimizer: Optimizer) -> bool:
    """Allocate the zero states of a first step of Adam or AdamW; return whether it did.

    A step along zero gradients with rate 0 changes no weight, and its count is reset. There must be no gradients
    before; there are none after. Other optimizers, and those with states, stay as they are.
    """
    if optimizer.state or type(optimizer) not in (Adam, AdamW, OnePassAdamW, EightBitAdamW):
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    assert all(parameter.grad is None for parameter in parameters)
    try:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        if isinstance(optimizer, OnePassAdamW):
            # Random bits come from counts of steps, which become 0 below.
            optimizer.undo_step_counts()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
    for state in tree_leaves(dict(optimizer.state)):
        state.zero_()
    return True
