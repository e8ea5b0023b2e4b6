"""An encoder under its own home: sharded by FSDP2 or copied, its blocks recomputed and split over tp.

The encoder has a world of its own, over the same ranks as the language model's. Whatever the slots of that world
encode, gradients are plain sums over slots: FSDP2 sums by itself, and gradients of copies are summed by
`gradients_summed_over_slots(module, world)`. Which rank encodes which items, and where rows go, is not in this module.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial, wraps
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from longspan.comm import World, on_all_ranks
from longspan.errors import ModelError
from longspan.layout.layout import excerpt
from longspan.model.activations.recompute import Recomputation, run_checkpointed
from longspan.model.multimodal.split_encoder import find_split_parts, split_encoder
from longspan.model.seams.forwards.norms import split_long_norms
from longspan.model.sharding import Sharding, shard_over_slots


def encoder_blocks(module: nn.Module, blocks: Sequence[nn.Module] | None = None) -> dict[str, nn.Module]:
    """Return the blocks of an encoder by qualified name, in the module's order.

    They are the given ones, or else the modules of its longest lists, all of them if several are equally long.

    >>> [*encoder_blocks(CLIPVisionModel(config))][:2]
    ['encoder.layers.0', 'encoder.layers.1']

    Of lists inside lists the outer one counts. The result is empty without a list. Raises ModelError for blocks that
    are not inside the module, or inside each other.
    """
    names = {child: name for name, child in module.named_modules()}
    if blocks is None:
        lists = dict(_outer_lists(module, ""))
        most_children = max((len(children._modules) for children in lists.values()), default=0)
        return {
            f"{name}.{i}": block
            for name, children in lists.items()
            if len(children._modules) == most_children
            for i, block in children.named_children()
        }
    outside = [type(block).__name__ for block in blocks if block not in names or block is module]
    if outside:
        raise ModelError(
            f"blocks {', '.join(outside[:4])} are not modules inside {type(module).__name__}; give some of its own"
        )
    outer_name = {id(child): names[block] for block in blocks for child in block.modules() if child is not block}
    if nested := [f"{names[block]} in {outer_name[id(block)]}" for block in blocks if id(block) in outer_name]:
        raise ModelError(f"blocks lie inside each other ({', '.join(nested[:4])}); give the outer or the inner ones")
    chosen = set(blocks)
    return {name: module for module, name in names.items() if module in chosen}


def _outer_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        qualified = f"{path}.{name}".lstrip(".")
        if isinstance(child, nn.ModuleList) or _is_list_of_blocks(child):
            yield qualified, child
        else:
            yield from _outer_lists(child, qualified)


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Return whether a Sequential holds blocks of one class, as in timm's vision towers; a block has children."""
    children = [*module.children()]
    return (
        isinstance(module, nn.Sequential)
        and len({type(child) for child in children}) == 1
        and all(any(True for _ in child.children()) for child in children)
    )


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

    All ranks call it together, with equal weights. `shard_parameters` shards them over the slots with FSDP2, otherwise
    every rank keeps a copy on its device; `reshard_after_forward` frees a block's gathered parameters between forward
    and backward; `activation_checkpointing` recomputes each block in backward: "full" (or True) all of it, "selective"
    all but the output of `attend`; `compute_dtype` (such as bfloat16) is what FSDP2 computes in: of a block's arguments
    only the first tensor is cast to it, so that rotary tables keep their type. `blocks` are what is sharded and
    recomputed one at a time; without it the modules of the longest list of modules. Parameters that need no gradient
    stay so: freeze them before.

    Where `world.home.tp` is above 1, attention and MLPs are split over the tensor-parallel ranks of a slot, which are
    given the same items. Their linears are recognised by name in the usual ways of writing a ViT (`split_encoder.py`);
    `tp_plan` has the styles of others: patterns of qualified names to "colwise", "rowwise", "qkv" (one linear of
    queries, keys and values) or "replicated". The first call compares each kind of block, its output and every
    gradient, with the unsplit one, and raises ModelError where they differ.

    Every call must use the same parameters on every slot; a slot without items runs some other item. A block that is
    sharded is called once in a forward pass, with the rows of all items: every call gathers its parameters, and slots
    have different numbers of items. A loop over items needs `blocks=[]`, which shards the encoder as one.

    Raises ModelError, before anything is changed, for a home, settings or a module that this does not fit.
    """
    sharding = Sharding(
        parameters=shard_parameters, reshard_after_forward=reshard_after_forward, compute_dtype=compute_dtype
    )
    recomputation = Recomputation.from_options(activation_checkpointing)
    _check_arguments(module, world, sharding)
    units = _sharding_units(module, blocks, recomputation)
    parts = find_split_parts(module, units, world.home.tp, tp_plan)
    _refuse_unlike_weights(module, world)
    if world.device.type == "cuda":
        split_long_norms(module)
    trials = split_encoder(module, units, parts, world) if world.home.tp > 1 else []
    for block in units.values():
        _recompute_block(block, recomputation)
    for trial in trials:  # once forwards are wrapped: a trial replaces the wrapped one for its call
        trial.hook_next_call()
    if sharding.parameters:
        _cast_first_tensor(units.values(), compute_dtype)
        _refuse_second_calls(module, units)
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


def _check_arguments(module: nn.Module, world: World, sharding: Sharding) -> None:
    world.check_open()
    name, home = type(module).__name__, world.home
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


def _sharding_units(
    module: nn.Module, blocks: Sequence[nn.Module] | None, recomputation: Recomputation
) -> dict[str, nn.Module]:
    """Return the blocks that are sharded and recomputed one at a time, by name; none: the encoder is sharded as one."""
    units = encoder_blocks(module, blocks)
    if not units and recomputation.measure != "none":
        raise ModelError(
            f"{type(module).__name__} has no list of blocks (nn.ModuleList) to recompute one at a time; name them in "
            "blocks=, or switch activation checkpointing off"
        )
    return units


def _refuse_unlike_weights(module: nn.Module, world: World) -> None:
    """Digests are compared first, and samples are gathered only to name ranks and weights that differ."""
    samples = {name: _sample_digest(parameter) for name, parameter in module.named_parameters()}
    digest = sha256(repr(samples).encode()).hexdigest()
    if world.control.is_same(digest, "comparison of weights"):
        return
    first_samples, *other_samples = world.control.gather_objects(samples, "comparison of weights")
    ranks = [
        rank
        for rank, samples_there in zip(world.home.ranks[1:], other_samples, strict=True)
        if samples_there != first_samples
    ]
    names = [
        name
        for name in first_samples
        if any(samples_there.get(name) != first_samples[name] for samples_there in other_samples)
    ]
    raise on_all_ranks(
        ModelError(
            f"ranks {excerpt(ranks)} hold other weights of {type(module).__name__} than rank {world.home.ranks[0]}: "
            f"{excerpt(names, 4)}; all begin with the same: seed every rank alike (torch.manual_seed) or load the same "
            "weights before prepare_encoder"
        )
    )


def _sample_digest(parameter: Tensor) -> str:
    numbers = parameter.detach().flatten()[:: max(1, parameter.numel() // 64)].double().tolist()
    return f"{tuple(parameter.shape)} {sha256(repr(numbers).encode()).hexdigest()[:12]}"


def _recompute_block(block: nn.Module, recomputation: Recomputation) -> None:
    """Wrap the block's forward so that backward runs it again; FSDP2's hooks on the module stay around the wrapper."""
    if recomputation.measure == "none":
        return
    inner: Any = block.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        run = partial(inner, **kwargs)
        if not torch.is_grad_enabled():
            return run(*args)
        return run_checkpointed(run, *args, measure=recomputation.measure)

    block.forward = forward


def _refuse_second_calls(module: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Hook the encoder so that a second call of a sharded block in a forward pass raises ModelError: slots would wait.

    A block that is recomputed in backward is not called again: its own forward runs, without hooks.
    """
    called, encoder = set[str](), type(module).__name__

    def note_call(name: str, *_: Any) -> None:
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
        block.register_forward_pre_hook(partial(note_call, f"{name} ({type(block).__name__})"), prepend=True)


def _cast_first_tensor(blocks: Any, dtype: torch.dtype | None) -> None:
    """Have blocks cast their first tensor argument, the hidden states, to `dtype`, and nothing else (None: nothing)."""
    if dtype is None:
        return

    def cast_input(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for index, value in enumerate(args):
            if isinstance(value, Tensor):
                return (*args[:index], value.to(dtype), *args[index + 1 :]), kwargs
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                return args, kwargs | {name: value.to(dtype)}
        return args, kwargs

    for block in blocks:
        block.register_forward_pre_hook(cast_input, with_kwargs=True)
