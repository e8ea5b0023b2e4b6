"""Optimizers by name: which class, with which arguments, over which parameters.

A class that is not longspan's own is tried on small sharded parameters before step 1.
"""

import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from longspan.comm import World
from longspan.config.sections import OptimizerSection
from longspan.config.text_values import NamedGroup, read_arguments
from longspan.errors import ConfigError
from longspan.model.weights.local_tensors import local_block, local_tensor
from longspan.plan.shape.name_patterns import meets_any
from longspan.train.optim.eight_bit_adamw import EightBitAdamW
from longspan.train.optim.muon import Muon, is_layer_matrix
from longspan.train.optim.one_pass_adamw import OnePassAdamW, RoundingBits

OPTIMIZERS: Mapping[str, type[Optimizer]] = {"adamw": AdamW, "muon": Muon, "sgd": SGD}
EIGHT_BIT_NEEDS = "which adamw with betas, eps and maximize alone has"
_ONE_PASS = {"betas", "eps", "maximize"}  # arguments that `OnePassAdamW` takes
# Arguments that have a key of their own, and are refused in optimizer.arguments.
_BY_KEY = {"lr": "optimizer.lr", "weight_decay": "optimizer.weight_decay"}
BETAS = (0.9, 0.95)  # adamw's and muon's, where optimizer.arguments has none
_WITH_BETAS = ("adamw", "muon")
_REFUSED = {
    "LBFGS": "it evaluates the loss several times in a step, which a run does once",
    "SparseAdam": "it updates sparse gradients, and those of a run are dense",
    "Muon": "it takes nothing but whole matrices",
}
_INSTEAD = {"Muon": "muon, which is Muon over shards for matrices of layers, and AdamW for the rest"}
_BIAS_OR_NORM = re.compile(r"bias$|(norm\d*|ln_\w+)\.[^.]+$")  # the parameter itself, or the module that it is in


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer's class and what it is called with.

    >>> choice = OptimizerChoice.from_section(OptimizerSection(class_="torch.optim.NAdam"))
    >>> optimizer = choice.build(parameter_groups(model, choice.weight_decay))
    """

    name: str
    lr: float = 1e-3
    weight_decay: float = 0.0
    arguments: tuple[tuple[str, Any], ...] = ()  # other than lr and weight_decay
    moments: str = ""  # adamw's: in the dtype of parameters, or "8bit"

    @classmethod
    def from_section(cls, optimizer: OptimizerSection) -> "OptimizerChoice":
        """Read the choice of [optimizer]. Raises ConfigError for a class that cannot train, or for its arguments."""
        arguments = parse_optimizer_arguments(optimizer.class_, optimizer.arguments)
        if optimizer.class_ in _WITH_BETAS:
            arguments = {"betas": BETAS} | arguments
        settings = tuple(arguments.items())
        return cls(optimizer.class_, optimizer.lr, optimizer.weight_decay, settings, optimizer.moments)

    @property
    def is_one_pass(self) -> bool:
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


def parameter_groups(
    model: nn.Module,
    name: str,
    weight_decay: float,
    rates: Mapping[str, float] | None = None,
    named_groups: Sequence[NamedGroup] = (),
) -> list[dict[str, Any]]:
    """Divide trainable parameters into groups of one rate and decay; DTensors apart, as kernels take no mixture.

    `rates` are learning rates by the names of modules (None: the optimizer's own); before them and `weight_decay` come
    those of `named_groups`, which need `rates`. Raises ConfigError for weight decay that the class does not know, for
    rates that do not fit, and for muon without matrices in layers, which are groups with `is_matrix`. Without
    parameters there is one empty group.
    """
    knows_decay = _accepts_argument(optimizer_class(name), "weight_decay")
    if (weight_decay or any(group.weight_decay for group in named_groups)) and not knows_decay:
        raise ConfigError(f"optimizer.class {name!r} knows no weight decay; set optimizer.weight_decay to 0")
    if rates is not None:
        _check_rates(model, rates)
    groups = defaultdict[tuple[bool, bool, float, bool, float], list[nn.Parameter]](list)
    for parameter, names in names_of_parameters(model).items():
        if parameter.requires_grad:
            parameter_name = names[0]
            without_decay = knows_decay and not has_weight_decay(parameter_name, parameter)
            rate = 0.0 if rates is None else rates[_innermost_module(rates, parameter_name)]
            is_matrix = name == "muon" and not without_decay and is_layer_matrix(parameter_name, parameter)
            decay = 0.0 if without_decay else weight_decay
            if (named := find_named_group(named_groups, names)) is not None:
                rate = rate if named.lr is None else named.lr
                decay = decay if without_decay or named.weight_decay is None else named.weight_decay
            groups[without_decay, not isinstance(parameter, DTensor), rate, is_matrix, decay].append(parameter)
    if name == "muon" and groups and not any(is_matrix for *_, is_matrix, _ in groups):
        raise ConfigError(
            f"optimizer.class 'muon' found none of the {sum(map(len, groups.values()))} trained parameters to be a "
            "matrix inside a layer, which it is for; use adamw"
        )
    settings = [
        {"params": parameters}
        | ({} if rates is None else {"lr": rate})
        | ({"weight_decay": decay} if knows_decay else {})
        | ({"is_matrix": True} if is_matrix else {})
        for (_, _, rate, is_matrix, decay), parameters in sorted(groups.items(), key=itemgetter(0))
    ]
    return settings or [{"params": []}]


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return all names of each parameter, of tied ones several, in the order of the first ones."""
    names = defaultdict[nn.Parameter, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return names


def find_named_group(groups: Sequence[NamedGroup], names: Iterable[str]) -> NamedGroup | None:
    """Return the last group that meets one of a parameter's names."""
    return next((group for group in reversed(groups) if any(meets_any([group.pattern], x) for x in names)), None)


def _check_rates(model: nn.Module, rates: Mapping[str, float]) -> None:
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    if unknown := [name for name in rates if name not in modules]:
        raise ConfigError(
            f"lr has a rate for {unknown[0]!r}, which is no module of this {type(model).__name__}; it has "
            f"{', '.join(name for name, _ in model.named_children())}, and modules inside these"
        )


def _innermost_module(modules: Iterable[str], parameter_name: str) -> str:
    around = [name for name in modules if not name or parameter_name.startswith(f"{name}.")]
    if not around:
        raise ConfigError(
            f"lr has rates for {', '.join(modules) or 'no module'}, but {parameter_name} is in none of them; name its "
            'module too, freeze it, or give a rate for "", which stands for all other modules'
        )
    return max(around, key=len)


def has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies: to matrices, one for each expert too, and to kernels of convolutions.

    Shapes do not decide it: the biases of experts (E, D) and norms of single heads (N, H) have two dims as well.

    >>> has_weight_decay("layers.0.mlp.experts.down_proj_bias", torch.zeros(8, 64))
    False
    """
    return parameter.ndim >= 2 and not _BIAS_OR_NORM.search(name.lower())


# ---- classes and arguments


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of "adamw", "muon", "sgd" or a dotted name.

    Raises ConfigError for a name that is no optimizer's class, or of a class that cannot train here.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ConfigError(
            f"optimizer.class is {name!r}; use {', '.join(OPTIMIZERS)}, or the dotted name of a class, such as "
            "torch.optim.NAdam"
        )
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the name, or the module when it is imported, raises
        raise ConfigError(
            f"optimizer.class {name!r} cannot be imported: {type(error).__name__}: {error}; install its package, or "
            "correct the name"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigError(f"optimizer.class {name!r} is {kind!r}, no class of torch.optim.Optimizer")
    if reason := _REFUSED.get(kind.__name__) or _class_fault_text(kind):
        raise ConfigError(
            f"optimizer.class {name!r} cannot train here: {reason}; use {_INSTEAD.get(kind.__name__, 'adamw')}"
        )
    return kind


def _class_fault_text(kind: type[Optimizer]) -> str:
    if not _accepts_argument(kind, "lr"):
        return "it takes no lr, which the schedule sets at every step"
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "its step needs a closure that evaluates the loss again"
    return ""


def parse_optimizer_arguments(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """Read the arguments of an optimizer's class, as `read_arguments` does, and check them."""
    arguments = read_arguments("optimizer.arguments", texts)
    for key in _BY_KEY.keys() & arguments.keys():
        raise ConfigError(f"optimizer.arguments has {key}, which is {_BY_KEY[key]}")
    check_optimizer_arguments(name, arguments)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


def check_optimizer_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that the optimizer's class does not take, and for a wrong value of a switch.

    A switch is true, false or null. Other values are left to the class.
    """
    kind = optimizer_class(name)
    parameters = inspect.signature(kind).parameters
    if unknown := [key for key in arguments if key == "params" or not _accepts_argument(kind, key)]:
        names = [key for key in parameters if key not in ("params", *_BY_KEY)]
        raise ConfigError(f"optimizer.class {name!r} has no argument {unknown[0]!r}; known: {', '.join(names)}")
    for key, value in arguments.items():
        if key not in parameters or isinstance(value, bool | None):
            continue
        kinds = {*re.findall(r"\w+", str(parameters[key].annotation))} - {
            "class",
            "typing",
            "Optional",
            "Union",
            "None",
        }
        if isinstance(parameters[key].default, bool) or kinds == {"bool"}:
            raise ConfigError(f"optimizer.class {name!r} is given {key}={value!r}, which is true or false")


def _accepts_argument(kind: type[Optimizer], argument: str) -> bool:
    parameters = inspect.signature(kind).parameters
    return argument in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def allocate_adam_states(optimizer: Optimizer) -> bool:
    """Allocate the zero states of a first step of Adam or AdamW; returns whether it did.

    A step along zero gradients with rate 0 changes no weight, and its count is reset. There must be no gradients.
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
            optimizer.take_back_counts()  # for its random bits: counts of steps become 0 below
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
    for state in tree_leaves(dict(optimizer.state)):
        state.zero_()
    return True


# updates that are tried, and their largest error as a share of the largest update
STEPS = 2
BOUND = 1e-4


def check_sharded_update(choice: OptimizerChoice, model: nn.Module, world: World) -> None:
    """Raise ConfigError, on every rank, where the optimizer updates sharded parameters otherwise than whole ones."""
    pairs = list(_make_whole_and_sharded(model, world.device))
    refusal = reason = ""
    try:
        reason = _describe_difference(choice, pairs) if pairs else ""
    except ConfigError as error:
        refusal = str(error)
    except Exception as error:  # an optimizer of any package may raise anything
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}"
    answers = world.control.gather_objects((refusal, reason), "optimizer on sharded parameters")
    for rank, (refusal, reason) in zip(world.home.ranks, answers, strict=True):
        if refusal:
            raise ConfigError(refusal)
        if reason:
            raise ConfigError(
                f"optimizer.class {choice.name!r} does not work on sharded parameters (DTensor), as a trial on small "
                f"ones showed on rank {rank}: {reason}; use adamw, sgd, or another class, or try "
                'optimizer.arguments = ["foreach=false"] where it has that'
            )


def _make_whole_and_sharded(model: nn.Module, device: torch.device) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Sharded dims have 4 numbers on each rank, others 4 in all."""
    kinds = dict[Any, nn.Parameter]()
    for parameter in model.parameters():
        if parameter.requires_grad and isinstance(parameter, DTensor):
            kinds.setdefault((parameter.device_mesh, parameter.placements, parameter.ndim), parameter)
    for parameter in kinds.values():
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        placements = parameter.placements
        shape = [4] * parameter.ndim
        for axis, placement in enumerate(placements):
            if (dim := getattr(placement, "dim", None)) is not None:
                shape[dim] *= mesh.size(axis)
        whole = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)
        yield nn.Parameter(_shard_like(whole, parameter)), nn.Parameter(whole)


def _shard_like(whole: Tensor, like: DTensor) -> DTensor:
    mesh = like.device_mesh
    placements = like.placements
    local = whole[local_block(whole.shape, mesh, placements)].clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _describe_difference(choice: OptimizerChoice, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> str:
    """Both take STEPS steps along the same gradients; states must be shards too, or plain numbers."""
    initial_values = [whole.detach().clone() for _, whole in pairs]
    optimizers = [choice.build([{"params": [pair[i] for pair in pairs]}]) for i in (0, 1)]
    for step in range(1, STEPS + 1):
        for sharded, whole in pairs:
            whole.grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step)).to(whole)
            assert isinstance(sharded, DTensor)
            sharded.grad = _shard_like(whole.grad, sharded)
        for optimizer in optimizers:
            optimizer.step()
    for (sharded, whole), initial in zip(pairs, initial_values, strict=True):
        assert isinstance(sharded, DTensor)
        update = (whole.detach() - initial).abs().max().item()
        expected = whole.detach()[local_block(whole.shape, sharded.device_mesh, sharded.placements)]
        error = (local_tensor(sharded.detach()) - expected).abs().max().item() if expected.numel() else 0.0
        if not error <= BOUND * update:
            return f"updates of {update:.3g} differ by {error:.3g} from those of whole parameters"
        for state in tree_leaves(optimizers[0].state[sharded]):
            if isinstance(state, Tensor) and state.ndim and not isinstance(state, DTensor):
                return (
                    f"a state {tuple(state.shape)} is this rank's alone (no DTensor), which no checkpoint can hold"
                )
            if not isinstance(state, Tensor | int | float):
                return f"a state is {state!r}, which no checkpoint can hold"
    return ""
