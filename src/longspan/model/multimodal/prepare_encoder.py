"""An encoder under its own home, over the language model's ranks: sharded or copied, its blocks recomputed and split.

Gradients are plain sums over slots: FSDP2's, or of copies by `sum_gradients_over_slots(module, world)`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.activations.recompute import run_checkpointed, uniform_policy
from longspan.model.multimodal.split_encoder import find_split_parts, split_encoder
from longspan.model.seams.norms import split_long_norms
from longspan.model.sharding import Sharding, shard_over_slots


def encoder_blocks(module: nn.Module, blocks: Sequence[nn.Module] | None = None) -> dict[str, nn.Module]:
    """Return the blocks of an encoder by qualified name, in order: the given ones, or the modules of its longest lists.

    ModelError for blocks that are not inside the module, or inside each other.
    """
    names = {child: name for name, child in module.named_modules()}
    if blocks is None:
        lists = dict(_outermost_block_lists(module, ""))
        most_children = max((len(children._modules) for children in lists.values()), default=0)
        return {
            f"{name}.{i}": block
            for name, children in lists.items()
            if len(children._modules) == most_children
            for i, block in children.named_children()
        }
    foreign = [type(block).__name__ for block in blocks if block not in names or block is module]
    if foreign:
        raise ModelError(
            f"blocks {', '.join(foreign[:4])} are not modules inside {type(module).__name__}; give some of its own"
        )
    outer_name = {id(child): names[block] for block in blocks for child in block.modules() if child is not block}
    if nested := [f"{names[block]} in {outer_name[id(block)]}" for block in blocks if id(block) in outer_name]:
        raise ModelError(
            f"blocks lie inside each other ({', '.join(nested[:4])}); give the outer or the inner ones"
        )
    chosen = set(blocks)
    return {name: module for module, name in names.items() if module in chosen}


def _outermost_block_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        qualified = f"{path}.{name}".lstrip(".")
        # A Sequential of blocks of one class, as in timm's vision towers; a block has children.
        blocks = [*child.children()] if isinstance(child, nn.Sequential) else []
        is_uniform = len({type(block) for block in blocks}) == 1
        is_list = is_uniform and all(any(True for _ in block.children()) for block in blocks)
        if isinstance(child, nn.ModuleList) or is_list:
            yield qualified, child
        else:
            yield from _outermost_block_lists(child, qualified)


_PREPARED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # the key of the world of each prepared encoder


def prepare_encoder(
    module: nn.Module,
    world: World,
    *,
    shard_parameters: bool = True,
    reshard_after_forward: bool = True,
    activation_checkpointing: bool | str = False,
    compute_dtype: torch.dtype | None = None,
    blocks: Sequence[nn.Module] | None = None,
    tp_plan: Mapping[str, str] | None = None,
) -> nn.Module:
    """Bring an encoder, of any class, under the home of its own world; returns the same module.

    >>> encoder_world = World(Layout(ranks=8))               # open, as is the language model's world over these ranks
    >>> encoder = prepare_encoder(MyEncoder(), encoder_world, compute_dtype=torch.bfloat16)

    All ranks call it together, with equal weights; freeze parameters before. `shard_parameters`,
    `reshard_after_forward`, `activation_checkpointing` and `compute_dtype` are those of `prepare`, by block: of a
    block's arguments only the first tensor is cast. `blocks` are what is sharded and recomputed one at a time; without
    it the modules of the longest list. A sharded block is called once in a forward pass, with the rows of all items: a
    loop over items needs `blocks=[]`. A slot without items runs some other item.

    Where `world.home.tp` is above 1, attention and MLPs are split, their linears recognised by name in the usual ways
    of writing a ViT; `tp_plan` has the styles of others: patterns of qualified names to "colwise", "rowwise", "qkv" or
    "replicated". The first call compares each kind of block with the unsplit one, and raises ModelError where they
    differ. Raises ModelError, before anything is changed, for a home, settings or a module that this does not fit.
    """
    sharding = Sharding(
        shard_parameters=shard_parameters, reshard_after_forward=reshard_after_forward, compute_dtype=compute_dtype
    )
    policy = uniform_policy(activation_checkpointing)
    _check_encoder_can_be_prepared(module, world, sharding)
    units = encoder_blocks(module, blocks)  # sharded and recomputed one at a time; none: the encoder as one
    if not units and policy != "none":
        raise ModelError(
            f"{type(module).__name__} has no list of blocks (nn.ModuleList) to recompute one at a time; name them in "
            "blocks=, or switch activation checkpointing off"
        )
    parts = find_split_parts(module, units, world.home.tp, tp_plan or {})
    _check_same_weights_on_all_ranks(module, world)
    if world.device.type == "cuda":
        split_long_norms(module)
    trials = split_encoder(module, units, parts, world) if world.home.tp > 1 else []
    if policy != "none":
        for block in units.values():
            _wrap_in_checkpoint(block, policy)
    for trial in trials:  # once forwards are wrapped: a trial replaces the wrapped one for its call
        trial.hook_next_call()
    if sharding.shard_parameters:
        if compute_dtype is not None:
            _cast_first_tensor(units.values(), compute_dtype)
        _hook_refusal_of_second_calls(module, units)
        shard_over_slots(units.values(), world, sharding, root=module, cast_block_inputs=False)
    else:
        nn.Module.to(module, world.device)
    _PREPARED[module] = world.key
    return module


def check_encoder_prepared(module: nn.Module, world: World) -> None:
    """Raise ModelError for an encoder that was not prepared over this world."""
    if _PREPARED.get(module) != world.key:
        raise ModelError(
            f"the encoder {type(module).__name__} was not prepared over this world, whose home is {world.home}; call "
            "prepare_encoder(module, encoder_world) with the world of its Encoder(...)"
        )


def _check_encoder_can_be_prepared(module: nn.Module, world: World, sharding: Sharding) -> None:
    world.check_open()
    name = type(module).__name__
    home = world.home
    if module in _PREPARED:
        raise ModelError(f"this {name} was prepared already; prepare an encoder once")
    for axis, degree in (("pp", home.pp), ("ep", home.ep)):
        if degree > 1:
            raise ModelError(
                f"the home of the encoder {name} has {axis} {degree}, and encoders are not split so; use "
                f"Layout({len(home.ranks)}, tp={home.tp})"
            )
    parameters = dict(module.named_parameters())
    if empty := [n for n, parameter in parameters.items() if parameter.is_meta]:
        raise ModelError(
            f"{len(empty)} parameters of {name} have no values ({', '.join(empty[:3])} are on the meta device); load "
            "or initialise the encoder before it is prepared"
        )
    for dtype in {parameter.dtype for parameter in parameters.values() if parameter.is_floating_point()}:
        sharding.check_compute_dtype(dtype)


def _check_same_weights_on_all_ranks(module: nn.Module, world: World) -> None:
    """All ranks enter it. Some 64 numbers of each parameter are compared."""
    samples = dict[str, object]()
    for name, parameter in module.named_parameters():
        numbers = parameter.detach().flatten()[:: max(1, parameter.numel() // 64)].double().tolist()
        samples[name] = tuple(parameter.shape), numbers
    hint = "Seed every rank alike (torch.manual_seed), or load the same weights, before prepare_encoder"
    digest = sha256(repr(samples).encode()).hexdigest()
    world.control.compare_digests(digest, what=f"weights of {type(module).__name__}", hint=hint)


def _wrap_in_checkpoint(block: nn.Module, policy: str) -> None:
    """FSDP2's hooks on the module stay around the wrapper."""
    inner: Any = block.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        run = partial(inner, **kwargs)
        if not torch.is_grad_enabled():
            return run(*args)
        return run_checkpointed(run, *args, policy=policy)

    block.forward = forward


def _hook_refusal_of_second_calls(module: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Slots would wait for each other. A block that is recomputed is not called again: its own forward runs."""
    called = set[str]()
    encoder = type(module).__name__

    def refuse_second_call(name: str, *_: Any) -> None:
        """Note a call of the block `name` in this forward pass; ModelError for a second one."""
        if name in called:
            raise ModelError(
                f"{name} was called twice in one forward pass of {encoder}, for each item by itself, it seems: its "
                "parameters are gathered for every call, and slots that encode other numbers of items would wait for "
                "each other. Call it once for the rows of all items, or use prepare_encoder(…, blocks=[]), which "
                "gathers the encoder as one, or shard_parameters=False"
            )
        called.add(name)

    module.register_forward_pre_hook(lambda *_: called.clear(), prepend=True)
    for name, block in units.items():
        block.register_forward_pre_hook(
            partial(refuse_second_call, f"{name} ({type(block).__name__})"), prepend=True
        )


def _cast_first_tensor(blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
    def cast_input(_: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the first tensor cast, positional ones first."""
        for index, value in enumerate(args):
            if isinstance(value, Tensor):
                return (*args[:index], value.to(dtype), *args[index + 1 :]), kwargs
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                return args, kwargs | {name: value.to(dtype)}
        return args, kwargs

    for block in blocks:
        block.register_forward_pre_hook(cast_input, with_kwargs=True)
