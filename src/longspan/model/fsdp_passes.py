"""What FSDP2 gathers, frees and sums in the passes of a step: how it is set before them, and put back after an error.

Modules are sharded in `sharding.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from longspan.model.sharding import fsdp_modules, reduction_groups, reshards_after_forward, sharding_of


@contextmanager
def keep_parameters_whole(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Keep parameters whole inside, and gradients whole and not summed: no slot waits for another; all ranks enter.

    The next backward pass behind it, which all slots must run, sums these over the slots: the yielded function, which
    stands for that of `defer_until_last_pass`, does nothing.
    """
    modules = fsdp_modules(model)
    for module in modules:
        _set_keep_gathered(module, True, reshard_after_forward=False)
        module.unshard()
    try:
        with leave_out_idle_hooks(model, trains=True):
            yield lambda: None
    finally:
        for module in modules:  # as `shard_over_slots` had set each
            _set_keep_gathered(module, False, reshard_after_forward=bool(reshards_after_forward(module)))


def drop_unsummed_gradients(model: nn.Module) -> None:
    """Drop gradients that backward passes left unsummed, which zero_grad() does not, and free what FSDP2 gathered."""
    for group in reduction_groups(fsdp_modules(model)):
        for parameter in group.fsdp_params:
            vars(parameter)["unsharded_accumulated_grad"] = None  # a property of `_unsharded_param` in torch 2.15
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                whole.grad = None
    reshard(model)


def _set_keep_gathered(module: FSDPModule, keep: bool, *, reshard_after_forward: bool) -> None:
    """Have one module's backward passes keep parameters gathered and gradients unsummed, or undo that."""
    module.set_requires_gradient_sync(not keep, recurse=False)
    module.set_reshard_after_backward(not keep, recurse=False)
    module.set_reshard_after_forward(reshard_after_forward, recurse=False)


@contextmanager
def defer_until_last_pass(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Until the yielded function is called, keep what passes of a step keep for the next ones: gathered parameters and
    unsummed gradients as `Sharding` says, and sums over the slots of each replica only.

    Call it before the last pass runs forward, which then has FSDP2's hooks. After an error unsummed shards are dropped.
    """
    modules = fsdp_modules(model)

    def set_last(last: bool = True) -> None:
        """Say whether the next pass is the step's last: then everything is summed and freed again."""
        for module in modules:
            sharding = sharding_of(module)
            module.set_requires_all_reduce(last, recurse=False)
            if not sharding.reshard_after_forward:
                module.set_reshard_after_backward(last, recurse=False)
            if not sharding.sync_each_batch:
                module.set_requires_gradient_sync(last, recurse=False)

    set_last(False)
    try:
        with leave_out_idle_hooks(model, trains=True):
            yield set_last
        assert all(group._partial_reduce_output is None for group in reduction_groups(modules)), (
            "the last backward pass was not announced"
        )
    finally:
        set_last()
        for group in reduction_groups(modules):
            group._partial_reduce_output = None


def keeps_parameters_gathered(model: nn.Module) -> bool:
    """Return whether all passes of a step in lockstep find its parameters whole."""
    return not any(sharding_of(module).reshard_after_forward for module in fsdp_modules(model))


def accumulate_gathered_gradients(groups: Iterable[Any]) -> None:
    """Add gathered gradients to earlier ones in float32, as FSDP2 does, after passes that it does not see."""
    for group in groups:
        if hasattr(group, "_set_unsharded_grad_dtypes"):  # torch 2.15
            group._set_unsharded_grad_dtypes(defer_upcast=False)
            continue
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


@contextmanager
def leave_out_idle_hooks(model: nn.Module, *, trains: bool = False) -> Iterator[None]:
    """Leave FSDP2's hooks of a block out of forward passes that find its parameters whole and keep them so, in models
    that do not free them after such a pass.

    `trains`: their backward passes, which sum nothing then, add gradients to earlier ones without hooks. What a pass
    will sum or free is to be set before it runs forward. Hooks of what FSDP2 takes for a root run, with which it begins
    and ends a pass. Only sums of three and more gradients of one tensor that several blocks take may round otherwise.
    """
    states = dict.fromkeys(x._get_fsdp_state() for x in fsdp_modules(model))
    blocks = list[_BlockHooks]()
    later = None
    try:
        # the last that is called first
        for state in reversed([state for state in states if len(state._modules) == 1]):
            later = _BlockHooks(state, later, trains=trains)
            blocks.append(later)
        yield
    finally:
        for block in blocks:
            block.leave()


class _BlockHooks:
    """Replaces FSDP2's two hooks of one block, which run only where they do something, until `leave` puts them back.

    `state` is FSDP2's of the block, `later` the block that is called next; `trains` is of `leave_out_idle_hooks`.
    """

    def __init__(self, state: Any, later: "_BlockHooks | None", *, trains: bool) -> None:
        """Put the two hooks of this object in the places of FSDP2's."""
        policy = state._mp_policy
        (module,) = state._modules
        self._state = state
        self._later = later
        self._trains = trains
        self._runs_fsdp_hooks = True  # in the pass that runs now
        self._groups: list[Any] = [*reduction_groups([module])]
        self._gradient_hook: Any = None
        self._input_dtype: torch.dtype | None = policy.param_dtype if policy.cast_forward_inputs else None
        self._casts_outputs: bool = policy.output_dtype is not None
        before = state._pre_forward_hook_handle.id
        after = state._post_forward_hook_handle.id
        self._places: Any = (module._forward_pre_hooks, before), (module._forward_hooks, after)
        self._fsdp_hooks = [hooks[key] for hooks, key in self._places]
        for (hooks, key), mine in zip(self._places, (self._begin_forward, self._end_forward), strict=True):
            hooks[key] = mine

    def leave(self) -> None:
        """Put FSDP2's hooks back."""
        for (hooks, key), hook in zip(self._places, self._fsdp_hooks, strict=True):
            hooks[key] = hook
        if self._gradient_hook is not None:
            self._gradient_hook.remove()

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Stand before the block's forward: run FSDP2's hook where it gathers, will sum or casts; None leaves the
        inputs.

        Where it does not, a hook on one gradient of the block adds those of the later block (`_add_later_gradients`).
        """
        busy = self._state._is_root is not False or any(  # None: not known before the first pass
            not group.is_unsharded or (self._trains and (group.reduce_grads or group.reshard_after_backward))
            for group in self._groups
        )
        dtype = self._input_dtype
        inputs = (*args, *kwargs.values())
        casts = self._casts_outputs or not (dtype is None or all(_stays_uncast(x, dtype) for x in inputs))
        self._runs_fsdp_hooks = busy or casts
        if self._trains and not busy and self._gradient_hook is None:
            whole = (parameter._unsharded_param for group in self._groups for parameter in group.fsdp_params)
            if (trained := next((x for x in whole if x.requires_grad), None)) is not None:
                self._gradient_hook = trained.register_post_accumulate_grad_hook(self._add_later_gradients)
        return self._fsdp_hooks[0](module, args, kwargs) if self._runs_fsdp_hooks else None

    def _end_forward(self, module: nn.Module, args: Any, out: Any) -> Any:
        """Stand behind the block's forward: run FSDP2's hook if the one before ran."""
        return self._fsdp_hooks[1](module, args, out) if self._runs_fsdp_hooks else None

    def _add_later_gradients(self, _: Tensor) -> None:
        """Add the later block's gradients of this pass to those of earlier ones, in float32.

        This block has a gradient, so those of the later one mostly are whole; FSDP2 adds others after the pass. In a
        pipeline the flag may be that of another micro-batch: gradients that are not there yet are added later.
        """
        if self._later is not None and not self._later._runs_fsdp_hooks:
            accumulate_gathered_gradients(self._later._groups)


def _stays_uncast(x: object, dtype: torch.dtype) -> bool:
    """Return whether FSDP2 would surely leave an argument uncast; it also casts in mappings, sets and dataclasses."""
    if isinstance(x, Tensor):
        return x.dtype == dtype or not x.is_floating_point()
    if isinstance(x, tuple | list):
        return all(_stays_uncast(value, dtype) for value in x)
    return not isinstance(x, Mapping | set) and not hasattr(x, "__dataclass_fields__")


def unshard(model: nn.Module) -> None:
    """Gather the parameters that FSDP2 has freed, for passes that it does not see; all ranks call it together."""
    for module in fsdp_modules(model):
        module.unshard()


def reshard(model: nn.Module) -> None:
    """Free parameters that FSDP2 kept gathered after a forward pass without backward, or an error in one.

    A later pass would take them for current ones. FSDP2's groups are idle then.
    """
    for module in fsdp_modules(model):
        state: Any = module._get_fsdp_state()
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False  # of a pass that failed, which autograd drops
        for group in reduction_groups([module]):
            group._training_state = TrainingState.IDLE
            group.wait_for_unshard()  # does something where the error came between a gather and its end
        module.reshard()
