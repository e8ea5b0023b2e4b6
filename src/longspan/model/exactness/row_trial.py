"""The trial of a prepared model before its first step: whether it computes each row by itself outside attention.

A few rows run without seeing each other (`SeparateRows`), then beside others and in another order: what each layer does
is compared. Not covered: long documents, gradients (`class_trial.py`), encoders, dropout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from longspan.comm import SequenceShard, World, bind, raise_first_error, to_device, world_of
from longspan.errors import ModelError
from longspan.layout.segments import Integers
from longspan.model.execution import model_execution
from longspan.model.fsdp_params import reshard
from longspan.model.kinds import has_experts
from longspan.model.layers import decoder_layers, mtp_depths, preserve_modes
from longspan.model.marks import IS_COMPILED, is_pipeline
from longspan.model.seams.call_rules import call_rules, is_prepared
from longspan.model.seams.doctor_hint import doctor_hint
from longspan.model.seams.meta_pass import restore_attributes_after
from longspan.model.seams.trial_shards import SeparateRows
from longspan.plan import Group, MicroBatch

# 71 rows, and 29 of the documents `_FEWER`: no width of a model is so many
_LENGTHS = (19, 1, 9, 3, 13, 5, 11, 2, 8)
_ALL = (0, 1, 2, 3, 4, 5, 6, 7, 8)
_FEWER = (8, 5, 4, 1, 7)
# By this seed the first and the last of the fewer rows are compared.
_SEED = 29
# Each part of the rows has as many numbers.
_COUNT = sum(_LENGTHS)


@dataclass(frozen=True, eq=False)
class _TrialRows:
    """The rows of one pass: `numbers` (T,) in their order, and the `shard` in which they do not meet.

    About half of the rows, drawn at random, are compared: their neighbours, their places and other documents' lengths
    must not matter to them. With `others`, rows that are not compared have other tokens. Under sequence parallelism
    this rank holds part number `part` of `parts`.
    """

    numbers: Integers
    shard: SeparateRows
    others: bool
    parts: int
    part: int

    @staticmethod
    def from_documents(
        world: World, parts: int, longest: int, documents: Sequence[int], *, others: bool
    ) -> "_TrialRows":
        """Make the rows of these documents, each cut to `longest` rows, for every slot and each of `parts` parts.

        A row's number is its index among the rows of all documents, plus _COUNT for each earlier part.
        """
        lengths = [min(length, longest) for length in _LENGTHS]
        starts = np.cumsum([0, *lengths])
        numbers_of_part = np.concatenate([np.arange(starts[d], starts[d + 1]) for d in documents])
        numbers = np.concatenate([part * _COUNT + numbers_of_part for part in range(parts)])
        of_slot = tuple(lengths[d] for d in documents) * parts
        slots = range(world.home.slots)
        n = len(of_slot)
        groups = tuple(Group((slot,), tuple(range(slot * n, (slot + 1) * n)), of_slot) for slot in slots)
        shard = SeparateRows.from_shard(bind(MicroBatch(groups), world))
        return _TrialRows(numbers, shard, others, parts, world.coordinates.tp if parts > 1 else 0)

    def row_numbers(self, rows: int) -> Integers | None:
        """Return the numbers of a tensor's rows: of all, or of this rank's part of them; None if it has other rows."""
        if rows == len(self.numbers):
            return self.numbers
        if rows * self.parts == len(self.numbers):
            return self.numbers.reshape(self.parts, -1)[self.part]
        return None

    def values_of_rows(self, values: Tensor) -> Tensor:
        """Take, of two values drawn for each row's number (2, numbers, …), those of these rows: (T, …).

        The second is taken where `others` changes the row.
        """
        others = (~_compared_mask(self.numbers) & self.others).astype(np.int64)
        return values[to_device(others, values.device), to_device(self.numbers, values.device)]

    def as_rows(self, value: Any) -> Tensor | None:
        """Return a module's input or output as (rows, …) if it has a row for each of these, without a batch dim; else
        None.
        """
        if not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1):
            return None
        if self.row_numbers(value.shape[0]) is not None:
            return value
        is_batch_of_one = value.ndim > 2 and value.shape[0] == 1
        if is_batch_of_one and self.row_numbers(value.shape[1]) is not None:
            return value[0]
        return None


def _compared_mask(numbers: Integers) -> Integers:
    """About half of the rows are compared, by a draw that depends on their numbers only."""
    return np.random.default_rng(_SEED).random(numbers.max(initial=0) + 1)[numbers] < 0.5


class _AllowedDifference(NamedTuple):
    """How far the compared rows of two passes may differ: `error`, relative to what a module adds to a row.

    A single number may differ by `epsilons` of the coarser of its type and `dtype`. With `median` a tensor's error is
    its rows' median.
    """

    dtype: torch.dtype
    error: float
    epsilons: int
    median: bool


class _CallKey(NamedTuple):
    """One tensor of a call: the module's name, which of its calls, output or input, and which of the tensors there."""

    module: str
    call: int
    out: bool
    leaf: int


@dataclass(eq=False)
class _ObservedPass:
    """Inputs and outputs of modules in one pass, and how far they are from those of the pass `before`.

    Hooks change what layers return: compared rows leave each layer as in the pass before, so that each layer is judged
    by its own effect. `errors` are shares of what is allowed, on the device.
    """

    rows: _TrialRows
    allowed: _AllowedDifference
    # These rows are compared with the rows of that pass; None: this is the first one.
    before: "_ObservedPass | None"
    tensors: dict[_CallKey, Tensor] = field(default_factory=dict[_CallKey, Tensor])
    errors: dict[_CallKey, Tensor] = field(default_factory=dict[_CallKey, Tensor])
    _calls: dict[str, int] = field(default_factory=dict[str, int])

    @contextmanager
    def observe_calls(self, modules: Mapping[str, nn.Module], layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Hook these modules and layers while the context is open: all are observed, and what layers return is changed
        as well.
        """
        with ExitStack() as stack:
            for name, module in {**modules, **layers}.items():
                observe_outputs: Callable[..., Any] = partial(self._observe_outputs, name, name in layers)
                observe_inputs = partial(self._observe_inputs, name)
                before = module.register_forward_pre_hook(observe_inputs, prepend=True, with_kwargs=True)
                after = module.register_forward_hook(observe_outputs)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _observe_inputs(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        self.observe(name, (args, kwargs), call, out=False)

    def _observe_outputs(self, name: str, is_layer: bool, module: nn.Module, args: Any, out: Any) -> Any:
        """A layer's output gets compared rows as they were, so that an error counts in the layer that makes it."""
        call = self._calls[name]
        inputs = self.tensors.get(_CallKey(name, call, False, 0)) if is_layer else None
        self.observe(name, out, call, added_to=inputs)
        if not is_layer or self.before is None:
            return None
        leaves, structure = tree_flatten(out)
        # The counter numbers tensors with a row for each of these rows.
        numbers = count()
        for index, value in enumerate(leaves):
            if (x := self.rows.as_rows(value)) is None:
                continue
            places, earlier = self._compared_rows(_CallKey(name, call, True, next(numbers)), x)
            if places is not None:
                leaves[index] = x.index_copy(0, places, earlier.to(x.dtype)).view_as(value)
        return tree_unflatten(leaves, structure)

    def observe(
        self, name: str, values: Any, call: int = 0, *, out: bool = True, added_to: Tensor | None = None
    ) -> None:
        """Record a call's tensors that have a row for each of these rows, and how far they are from the pass before.

        `added_to` is the input to which a layer has added what it computed. The first pass keeps copies, since modules
        may write into their tensors.
        """
        tensors = [x for leaf in tree_leaves(values) if (x := self.rows.as_rows(leaf)) is not None]
        for leaf, x in enumerate(tensors):
            key = _CallKey(name, call, out, leaf)
            recorded = x.detach().clone() if self.before is None else x.detach()
            self.tensors[key] = recorded
            places, earlier = self._compared_rows(key, recorded)
            if places is not None:
                inputs = None
                if added_to is not None and added_to.shape == recorded.shape:
                    inputs = added_to[places]
                self.errors[key] = _share_of_allowed(recorded[places], earlier, inputs, self.allowed)

    def _compared_rows(self, key: _CallKey, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Without a tensor to compare with, or common rows, the indices are None, and the second has no meaning."""
        before = self.before
        earlier = x if before is None else before.tensors.get(key, x)
        if before is None or earlier is x or x.shape[1:] != earlier.shape[1:]:
            return None, x
        here = self.rows.row_numbers(len(x))
        there = before.rows.row_numbers(len(earlier))
        assert here is not None and there is not None
        compared = np.flatnonzero(_compared_mask(here))
        _, indices, earlier_indices = np.intersect1d(here[compared], there, assume_unique=True, return_indices=True)
        places = to_device(compared[indices], x.device) if len(indices) else None
        return places, earlier[to_device(earlier_indices, x.device)]

    def find_module_at_fault(self) -> tuple[str, float] | None:
        """Return the first module whose outputs differ while its inputs do not, and its error; None if nothing differs.

        If there is no such module, it is the first one with a difference.
        """
        shares = torch.stack(list(self.errors.values())).tolist() if self.errors else []
        different = {key: share for key, share in zip(self.errors, shares, strict=True) if share > 1}
        with_other_inputs = {key[:2] for key in different if not key.out}
        culprits = [key for key in different if key.out and key[:2] not in with_other_inputs]
        key = next(iter(culprits or different), None)
        return None if key is None else (key.module, different[key] * self.allowed.error)


def _share_of_allowed(rows: Tensor, earlier: Tensor, inputs: Tensor | None, allowed: _AllowedDifference) -> Tensor:
    """What exceeds rounding is measured against what a module adds to a row: `earlier` less a layer's `inputs`, or
    without inputs all of it. A row with a NaN has no error, one with an infinite number has."""
    result, exact = (x.flatten(1).to(torch.promote_types(x.dtype, torch.float32)) for x in (rows, earlier))
    added = exact if inputs is None else exact - inputs.flatten(1)
    epsilon = torch.finfo(rows.dtype).eps
    rounding = allowed.epsilons * max(epsilon, torch.finfo(allowed.dtype).eps)
    excess = ((result - exact).abs() - rounding * exact.abs()).clamp(min=0).norm(dim=1)
    # A layer may add next to nothing to a row: then a small share of the largest row's size is taken, never zero.
    size = added.norm(dim=1).clamp(min=1e-3 * epsilon * exact.norm(dim=1).max()).clamp(min=1e-30)
    shares = (excess / size).nan_to_num(nan=0.0) / allowed.error
    return (shares.median() if allowed.median else shares.max()).double()


# ---- the trial


def try_rows(model: nn.Module, world: World, *, backward: bool) -> None:
    """Raise ModelError on every rank, before a model's first step in a mode, if rows influence each other.

    The mode is evaluation for a step without `backward`. All ranks call it; later calls in that mode do nothing.
    """
    if not is_prepared(model) or backward in _tried_modes(model):
        return
    trial = _RowTrial(model, world)
    with (
        _clean_up_after_trial(model),
        world.watch.name_collectives("trial of rows outside attention", world.home.ranks),
    ):
        # A model in training, for a step that trains, is left alone: its user may have put modules into evaluation.
        if not (backward and model.training):
            model.train(backward)
        error = trial.run_and_find_error(every_module=False)
        if world.control.flag_on_any_rank(error is not None):
            # All ranks run the passes again, comparing all modules, which name the culprit closer than layers.
            raise_first_error(world, trial.run_and_find_error(every_module=True) or error)
    _tried_modes(model).add(backward)


def try_rows_before_call(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Try a prepared model before its first call in a mode, unless a step did so: a hook, for loops of one's own."""
    shard = kwargs.get("shard")
    if (
        model.training in _tried_modes(model)
        or isinstance(shard, SeparateRows)
        or not isinstance(shard, SequenceShard)
    ):
        return
    with _clean_up_after_trial(model):
        if error := _RowTrial(model, world_of(shard.world_key)).run_and_find_error(every_module=False):
            raise error
    _tried_modes(model).add(model.training)


def _tried_modes(model: nn.Module) -> set[bool]:
    """True: training. The model keeps the set, and callers add to it."""
    return vars(model).setdefault("modes_of_row_trial", set[bool]())


@contextmanager
def _clean_up_after_trial(model: nn.Module) -> Iterator[None]:
    is_compiled = any(IS_COMPILED in vars(module) for module in model.modules())
    with preserve_modes(model), torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
        try:
            yield
        finally:
            reshard(model)


class _RowTrial:
    """The passes of a model, or of each stage that is here, and what differs between them.

    The first pass has all rows. The last has fewer, in another order and beside others. Where products round coarsely a
    pass of all rows, in the same order beside others, is made between them; elsewhere the last shows what it would.
    A row is known by its number: `ids` and `later` (for depths) are (2, numbers, …); the second are for rows that have
    other tokens.
    """

    def __init__(self, model: Any, world: World) -> None:
        """Draw the ids of the trial, and choose its passes by the type in which the model computes."""
        self.model = model
        self.world = world
        rules = call_rules(model)
        # A pair is what is called, and the model in it.
        self.parts = [(stage, stage.model) for stage in model.stages] if is_pipeline(model) else [(model, model)]
        dtype = model_execution(model).compute_dtype
        if torch.is_autocast_enabled(world.device.type):
            dtype = torch.get_autocast_dtype(world.device.type)
        tf32 = world.device.type == "cuda" and dtype == torch.float32
        self.dtype = dtype
        self.coarse = tf32 or torch.finfo(dtype).bits <= 16
        self.experts = has_experts(model)
        longest = max(_LENGTHS) if rules.position_table is None else rules.position_table.positions
        rows = partial(_TrialRows.from_documents, world, rules.row_multiple, longest)
        self.first = rows(_ALL, others=False)
        self.others = [rows(_FEWER, others=True)]
        if self.coarse:
            self.others.insert(0, rows(_ALL, others=True))
        self.shape = 2, _COUNT * rules.row_multiple
        vocabulary = model.config.get_text_config().vocab_size
        depths = model.depths if is_pipeline(model) else len(mtp_depths(model))
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(vocabulary, self.shape, generator=generator).to(world.device)
        self.later = torch.randint(vocabulary, (*self.shape, depths), generator=generator).to(world.device)

    def run_and_find_error(self, *, every_module: bool) -> ModelError | None:
        """Run all passes, and return the first difference as an error; None without.

        Entered by all ranks, as the passes communicate. With `every_module` modules are compared, else decoder layers
        alone.
        """
        mode = "training" if self.model.training else "evaluation"
        all_rows = len(self.first.numbers)
        differences = list[str]()
        for stage, model in self.parts:
            first_pass = self._run_stage(stage, model, self.first, None, every_module=every_module)
            for rows in self.others:
                observed = self._run_stage(stage, model, rows, first_pass, every_module=every_module)
                if (culprit := observed.find_module_at_fault()) is None:
                    continue
                path, error = culprit
                module = dict(model.named_modules()).get(path)  # None for what `_run_pass` observes by a text
                kind = "" if module is None else type(module).__name__.removeprefix("FSDP")
                name = f"{path} ({kind})" if path and kind else path or kind
                n = len(rows.numbers)
                compared = "the same" if n == all_rows else f"{n} of them in another order"
                differences.append(
                    f"{name}: in {mode} mode {all_rows} rows, without attention, and {compared} beside others differ "
                    f"by {error:.1e} of what it makes of them, where {observed.allowed.error:.0e} is allowed"
                )
            first_pass = observed = None  # frees the tensors that the passes keep, before the next stage runs
        if not differences:
            return None
        return ModelError(
            f"{call_rules(self.model).architecture} cannot run exactly over a sharded sequence: rows influence each "
            f"other outside attention, first in {differences[0]}. Have every module, patch and hook there make a row "
            f"of that row alone, or leave it out{doctor_hint(self.model)}"
        )

    def _run_stage(
        self, stage: Any, model: Any, rows: _TrialRows, before: _ObservedPass | None, *, every_module: bool
    ) -> _ObservedPass:
        # 1e-4 is for float32, in which norms and routers may be, whatever the model's type. In coarse types least is
        # allowed where every product has the same shapes, and most where rounding may choose other experts.
        same_shapes = len(rows.numbers) == len(self.first.numbers)
        other_experts = self.experts and not same_shapes
        if same_shapes and not self.experts:
            allowed = _AllowedDifference(self.dtype, 0.01 if self.coarse else 1e-4, 0, median=False)
        elif not self.coarse:
            allowed = _AllowedDifference(self.dtype, 1e-4, 16, median=False)
        else:
            allowed = _AllowedDifference(self.dtype, 0.1 if other_experts else 0.05, 2, median=other_experts)
        observed = _ObservedPass(rows, allowed, before)
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        buffers = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
        try:
            with restore_attributes_after(model), torch.no_grad(), torch.random.fork_rng(devices):
                torch.manual_seed(0)
                for module in model.modules():
                    module.training = module.training and not isinstance(module, nn.modules.dropout._DropoutNd)
                modules = dict(model.named_modules()) if every_module else {}
                with observed.observe_calls(modules, decoder_layers(model)):
                    self._run_pass(stage, observed)
        finally:
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)
        return observed

    def _run_pass(self, stage: Any, observed: _ObservedPass) -> None:
        rows = observed.rows
        ids = rows.values_of_rows(self.ids)[None]
        positions = rows.shard.position_ids[None]
        later = {"future_ids": rows.values_of_rows(self.later).t().contiguous()} if self.later.shape[2] else {}

        def observe_hidden(hidden: Tensor, head: Callable[[Tensor], Tensor], *deeper: Tensor) -> Tensor:
            """Note hidden states, logits and states of depths, as a loss gets them; return a loss of 0."""
            observed.observe("the last hidden states", hidden)
            observed.observe("the logits", head(hidden))
            for depth, x in enumerate(deeper):
                observed.observe(f"the hidden states of depth {depth + 1} of multi-token prediction", x)
            return hidden.new_zeros(())

        if not is_pipeline(self.model):
            stage(input_ids=ids, position_ids=positions, shard=rows.shard, row_loss=observe_hidden, **later)
            return
        from longspan.model.pipeline.stages import StageInput

        def make_output(part: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
            return part(**arguments, row_loss=observe_hidden, **later)

        inputs = ids if stage.first else self._make_hidden_states(stage, rows)
        out = stage(inputs, stage_input=StageInput(rows.shard, ids, make_output))
        if not stage.last:
            # Embedded rows behind the hidden states are no result: split over tp 2, both together look like all rows.
            observed.observe("the hidden states after its last layer", out[0].chunk(1 + stage.with_embedding)[0])

    def _make_hidden_states(self, stage: Any, rows: _TrialRows) -> Tensor:
        """The same (1, T, D) for a row's number in every pass; behind them embedded rows, if stages hand these on."""
        generator = torch.Generator().manual_seed(4)
        inputs = list[Tensor]()
        width = self.model.config.get_text_config().hidden_size
        for _ in range(1 + stage.with_embedding):
            values = torch.randn(*self.shape, width, generator=generator).to(self.world.device, self.model.dtype)
            inputs.append(rows.values_of_rows(values).unflatten(0, (rows.parts, -1))[rows.part])
        return torch.cat(inputs)[None]
