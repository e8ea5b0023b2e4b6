"""The trial of a prepared model before its first step: whether it computes each row by itself outside attention.

Over a sharded sequence a rank has some of the rows, in an order of its own, and packed documents stand next to each
other. So the result of a row must not depend on others, except through attention and mixers, which know the shard. The
model itself, with its patches, hooks, weights, type and home, runs a few rows, then the same rows next to others, then
some of them in another order, without gradients and without attention (`SeparateRows`). What each layer does
to them is compared. All ranks do so together, as parameters and experts may be spread over them;
stages of a pipeline do so by themselves, from random hidden states. It happens once in training mode and once in
evaluation mode, before the first step that runs so, and leaves nothing behind.

Not covered: effects that only long documents show, gradients (of classes: `class_trial.py`), encoders, dropout.
(Only an adapter may drop out in training: each rank draws for its own rows.)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from longspan.comm import SequenceShard, World, bind, raise_first_error, to_device, world_of
from longspan.errors import ModelError
from longspan.layout.segments import Integers
from longspan.model.compiled_layers import is_compiled
from longspan.model.execution import model_execution
from longspan.model.layers import decoder_layers, has_experts
from longspan.model.mtp.depths import model_depths
from longspan.model.parts import preserve_modes
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.pipeline.stages import Stage, StageInput
from longspan.model.seams.attention_calls import SeparateRows
from longspan.model.seams.call_rules import PositionTable, call_rules, is_prepared
from longspan.model.seams.meta_pass import preserve_attributes
from longspan.model.seams.refusals import doctor_hint
from longspan.model.sharding import reshard
from longspan.plan import Group, MicroBatch

_LENGTHS = (19, 1, 9, 3, 13, 5, 11, 2, 8)  # 71 rows, and 29 of the documents `_FEWER`: no width of a model is so many
_ALL, _FEWER = (0, 1, 2, 3, 4, 5, 6, 7, 8), (8, 5, 4, 1, 7)
_SEED = 29  # by which the first and the last of the fewer rows are compared
COUNT = sum(_LENGTHS)  # of the numbers of rows, for each part


@dataclass(frozen=True, eq=False)
class TrialRows:
    """The rows of one pass: `numbers` (T,) of rows in their order, and the `shard` in which they do not meet.

    Every slot has a few documents of its own. Every second row, at random, is compared: the rows next to it, how many
    there are, its place among them and the length of the longest document must not matter to it.

    With `others`, rows that are not compared have other tokens than without. Under sequence parallelism
    tensor-parallel ranks hold `parts` equal parts of the rows, this rank the one with the number `part`.
    """

    numbers: Integers
    shard: SeparateRows
    others: bool
    parts: int
    part: int

    def row_numbers(self, rows: int) -> Integers | None:
        """Return the numbers of a tensor's rows, which are all or this rank's part of them; None for another size."""
        if rows == len(self.numbers):
            return self.numbers
        return self.numbers.reshape(self.parts, -1)[self.part] if rows * self.parts == len(self.numbers) else None

    def choose_values(self, values: Tensor) -> Tensor:
        """Choose among values (2, numbers, …) those of these rows (T, …).

        With `others`, rows that are not compared get the second ones.
        """
        others = (~is_compared(self.numbers) & self.others).astype(np.int64)
        return values[to_device(others, values.device), to_device(self.numbers, values.device)]


def is_compared(numbers: Integers) -> Integers:
    """Return which rows (T,) are compared: about half, by a draw that depends on their numbers only."""
    return np.random.default_rng(_SEED).random(numbers.max(initial=0) + 1)[numbers] < 0.5


def make_trial_rows(world: World, parts: int, table: PositionTable | None) -> tuple[TrialRows, TrialRows, TrialRows]:
    """Make the rows of three passes: some rows, the same next to others, and fewer next to others in another order.

    `parts` is the number of tensor-parallel ranks among which sequence parallelism splits rows; 1 where it does not.
    Documents are no longer than a model's table of positions, if it has one.
    """
    most_positions = max(_LENGTHS) if table is None else table.positions
    lengths = [min(length, most_positions) for length in _LENGTHS]
    return (
        _document_rows(world, parts, lengths, _ALL, others=False),
        _document_rows(world, parts, lengths, _ALL, others=True),
        _document_rows(world, parts, lengths, _FEWER, others=True),
    )


def _document_rows(
    world: World, parts: int, lengths: Sequence[int], documents: Sequence[int], *, others: bool
) -> TrialRows:
    """Return the rows of one pass: these documents on every slot, once for each of `parts` ranks.

    `documents` are indices of `lengths`; for `others` see `TrialRows`. A row's number is its index among the rows of
    all documents, plus COUNT for each earlier part. With several parts, sequence parallelism splits rows between
    layers, and this rank has the part of its tp rank.
    """
    starts = np.cumsum([0, *lengths])
    numbers_of_part = np.concatenate([np.arange(starts[d], starts[d + 1]) for d in documents])
    numbers = np.concatenate([rank_part * COUNT + numbers_of_part for rank_part in range(parts)])
    slot_lengths = tuple(lengths[d] for d in documents) * parts
    count = len(slot_lengths)
    groups = tuple(
        Group((slot,), tuple(range(slot * count, (slot + 1) * count)), slot_lengths) for slot in range(world.home.slots)
    )
    shard = SeparateRows.of(bind(MicroBatch(groups), world).with_spans({}))
    return TrialRows(numbers, shard, others, parts, world.coordinates.tp if parts > 1 else 0)


class Precision(NamedTuple):
    """The type that a model computes in, whether float32 products may run in TF32, and whether it has experts.

    How many rows an expert gets depends on other rows, and so do the shapes of its products.
    """

    dtype: torch.dtype
    tf32: bool
    experts: bool

    @property
    def rounds_coarsely(self) -> bool:
        """Whether products are rounded so much that passes of other shapes show little."""
        return self.tf32 or torch.finfo(self.dtype).bits <= 16

    def must_be_equal(self, *, same_shapes: bool) -> bool:
        """Return whether rows must be the same bit by bit, as every product has the same shapes."""
        return same_shapes and not self.experts

    def tolerance(self, *, same_shapes: bool) -> float:
        """Return how far a row may differ, relative to what a module adds to it.

        1e-4 is for float32, in which norms and routers may be, whatever the model's type. In coarse types it is least
        where every product has the same shapes, and most where rounding may let a router choose other experts.
        """
        if not self.rounds_coarsely:
            return 1e-4
        if self.must_be_equal(same_shapes=same_shapes):
            return 0.01
        return 0.1 if self.experts and not same_shapes else 0.05

    def rounding(self, x: Tensor, *, same_shapes: bool) -> float:
        """Return by how much rounding may change a number, relative to it: some epsilons of the coarser type."""
        if self.must_be_equal(same_shapes=same_shapes):
            return 0.0
        return (2 if self.rounds_coarsely else 16) * max(torch.finfo(x.dtype).eps, torch.finfo(self.dtype).eps)

    def combine_errors(self, errors: Tensor, *, same_shapes: bool) -> Tensor:
        """Return the error of a tensor from those of its rows.

        It is the largest, or the median where rounding may let a router choose other experts for some rows.
        """
        return errors.median() if self.rounds_coarsely and self.experts and not same_shapes else errors.max()


class Key(NamedTuple):
    """An input or output (`out`) tensor of a module: the module's name, the number of its call, and the tensor's index.

    `leaf` counts only tensors of rows.
    """

    module: str
    call: int
    out: bool
    leaf: int


class ObservedPass:
    """Inputs and outputs of modules in one pass over some rows, and how far they are from those of the pass `before`.

    The compared rows leave each layer as they did in the pass before, so that differences do not grow from layer to
    layer: each is judged by its own effect, in the precision that it computes in.

    `errors` are in the order of the pass, as shares of the tolerance: above 1 rows have changed.
    """

    def __init__(self, rows: TrialRows, precision: Precision, before: "ObservedPass | None" = None) -> None:
        """Begin a pass.

        `_calls` has the number of each module's latest call. `_places` has the indices of the compared rows in a tensor
        and in that of the pass before, by how many rows the two have.
        """
        self.rows: TrialRows = rows
        self.precision: Precision = precision
        self.before: ObservedPass | None = before
        self.tensors: dict[Key, Tensor] = dict[Key, Tensor]()
        self.errors: dict[Key, Tensor] = dict[Key, Tensor]()
        self._calls, self._places = dict[str, int](), dict[tuple[int, int], Any]()

    @contextmanager
    def observe_calls(self, modules: Mapping[str, nn.Module], layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Note and compare calls of these modules; those of `layers` return the rows of the pass before.

        Inputs are noted before other hooks, which count as part of their module, see them.
        """
        with ExitStack() as stack:
            for name, module in {**modules, **layers}.items():
                note_inputs = module.register_forward_pre_hook(
                    partial(self._note_inputs, name), prepend=True, with_kwargs=True
                )
                note_outputs: Callable[..., Any] = partial(self._note_outputs, name, name in layers)
                for handle in (note_inputs, module.register_forward_hook(note_outputs)):
                    stack.callback(handle.remove)
            yield

    def note_value(self, name: str, x: Tensor) -> None:
        """Note a value that is not a module's."""
        self._note_tensors(name, 0, x, None)

    def read_errors(self) -> dict[Key, float]:
        """Read the error of every tensor; all are read from the device at once."""
        if not self.errors:
            return {}
        return dict(zip(self.errors, torch.stack(list(self.errors.values())).tolist(), strict=True))

    def _note_inputs(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        for leaf, x in enumerate(_row_tensors(self.rows, (args, kwargs))):
            self._compare_tensor(Key(name, call, out=False, leaf=leaf), x, None)

    def _note_outputs(self, name: str, is_layer: bool, module: nn.Module, args: Any, out: Any) -> Any:
        """A layer's callers get the rows of the pass before, so that an error counts in the layer that makes it."""
        call = self._calls[name]
        layer_input = self.tensors.get(Key(name, call, out=False, leaf=0)) if is_layer else None
        self._note_tensors(name, call, out, layer_input)
        return self._replace_rows(name, call, out) if is_layer and self.before is not None else None

    def _note_tensors(self, name: str, call: int, out: Any, layer_input: Tensor | None) -> None:
        for leaf, x in enumerate(_row_tensors(self.rows, out)):
            added_to = layer_input if layer_input is not None and layer_input.shape == x.shape else None
            self._compare_tensor(Key(name, call, out=True, leaf=leaf), x, added_to)

    def _compare_tensor(self, key: Key, x: Tensor, added_to: Tensor | None) -> None:
        """Keep a tensor, and its error relative to the pass before.

        `added_to` is the input to which a layer has added this output; None for tensors that are compared as a whole.
        The first pass keeps a copy, since modules may write into their tensors before the next pass reads it.
        """
        x = self.tensors[key] = x.detach().clone() if self.before is None else x.detach()
        if self.before is None or (earlier := self.before.tensors.get(key)) is None:
            return
        if (pairs := self._rows_to_compare(x, earlier)) is not None:
            places, earlier_places = pairs
            input_rows = None if added_to is None else added_to[places]
            self.errors[key] = self._relative_error(x[places], earlier[earlier_places], input_rows)

    def _rows_to_compare(self, x: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor] | None:
        """Indices of compared rows in a tensor, and in that of the pass before; None if there are none."""
        sizes = len(x), len(earlier)
        if sizes not in self._places:
            assert self.before is not None
            numbers_here, earlier_numbers = self.rows.row_numbers(sizes[0]), self.before.rows.row_numbers(sizes[1])
            assert numbers_here is not None and earlier_numbers is not None
            common = np.intersect1d(numbers_here[is_compared(numbers_here)], earlier_numbers)
            places = (to_device(_find_places(numbers, common), x.device) for numbers in (numbers_here, earlier_numbers))
            self._places[sizes] = (*places,) if len(common) else None
        return self._places[sizes] if x.shape[1:] == earlier.shape[1:] else None

    def _relative_error(self, x: Tensor, earlier: Tensor, input_rows: Tensor | None) -> Tensor:
        """Return the error of these rows (R, …) as a share of the tolerance.

        It is the norm of what differs beyond rounding, over the norm of what the module added to its input, as residual
        streams are much larger than what a layer adds. `input_rows` is that input; None: all of x counts as added.
        """
        assert self.before is not None
        same_shapes = len(self.rows.numbers) == len(self.before.rows.numbers)
        rounding = self.precision.rounding(x, same_shapes=same_shapes)
        tolerance = self.precision.tolerance(same_shapes=same_shapes)
        a, b = (tensor.flatten(1).to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (x, earlier))
        added = b if input_rows is None else b - input_rows.flatten(1)
        excess = ((a - b).abs() - rounding * b.abs()).clamp(min=0).norm(dim=1)
        # Rows to which next to nothing is added count as if something were, relative to the largest row.
        size = added.norm(dim=1).clamp(min=1e-3 * torch.finfo(x.dtype).eps * b.norm(dim=1).max()).clamp(min=1e-30)
        errors = (excess / size).nan_to_num(nan=0.0) / tolerance  # NaN shows nothing, infinity is an error
        return self.precision.combine_errors(errors, same_shapes=same_shapes).double()

    def _replace_rows(self, name: str, call: int, out: Any) -> Any:
        assert self.before is not None
        leaves, structure = tree_flatten(out)
        changed, leaf = list[Any](), 0
        for value in leaves:
            if _as_row_tensor(self.rows, value) is not None:
                changed.append(self._replace_tensor_rows(value, Key(name, call, out=True, leaf=leaf)))
                leaf += 1
            else:
                changed.append(value)
        return tree_unflatten(changed, structure)

    def _replace_tensor_rows(self, value: Tensor, key: Key) -> Tensor:
        assert self.before is not None
        x, earlier = _as_row_tensor(self.rows, value), self.before.tensors.get(key)
        if x is None or earlier is None or (pairs := self._rows_to_compare(x, earlier)) is None:
            return value
        places, earlier_places = pairs
        return x.index_copy(0, places, earlier[earlier_places].to(x.dtype)).view_as(value)


def _row_tensors(rows: TrialRows, values: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if (x := _as_row_tensor(rows, leaf)) is not None:
            yield x


def _as_row_tensor(rows: TrialRows, value: Any) -> Tensor | None:
    """A value as a tensor of rows (R, …) if it is one of the pass: floating, (R, …) or (1, R, …)."""
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1):
        return None
    if rows.row_numbers(value.shape[0]) is not None:
        return value
    is_batch_of_one = value.ndim > 2 and value.shape[0] == 1
    return value[0] if is_batch_of_one and rows.row_numbers(value.shape[1]) is not None else None


def _find_places(numbers: Integers, chosen: Integers) -> Integers:
    order = np.argsort(numbers)
    return order[np.searchsorted(numbers, chosen, sorter=order)]


# ---- the trial


def try_rows(model: nn.Module, world: World, *, backward: bool) -> None:
    """Raise ModelError on every rank, before a model's first step in a mode, if rows influence each other.

    All ranks enter it together. A step without `backward` runs in evaluation mode.
    """
    if not is_prepared(model) or backward in _trial_modes(model):
        return
    trial = _Trial(model, world)
    with _clean_up_after_trial(model), world.watch.naming("trial of rows outside attention", world.home.ranks):
        if not (backward and model.training):  # a model in training keeps the modules that its user froze as they are
            model.train(backward)
        differences = trial.find_differences(every_module=False)
        if world.control.any_rank(bool(differences)):
            module_differences = trial.find_differences(every_module=True)  # by all ranks together
            differences = module_differences or differences  # modules name the culprit closer than layers
            raise_first_error(world, trial.refusal_error(differences) if differences else None)
    _trial_modes(model).add(backward)


def try_rows_at_first_call(model: nn.Module) -> None:
    """Try a prepared model before its first call in a mode, unless a step did so: for loops of one's own."""
    model.register_forward_pre_hook(_try_before_call, prepend=True, with_kwargs=True)


def _try_before_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Ranks that make the call together find the same, so that they need not agree on it as in `try_rows`."""
    shard = kwargs.get("shard")
    if model.training in _trial_modes(model) or isinstance(shard, SeparateRows) or not isinstance(shard, SequenceShard):
        return
    trial = _Trial(model, world_of(shard.world_key))
    with _clean_up_after_trial(model):
        if differences := trial.find_differences(every_module=False):
            raise trial.refusal_error(differences)
    _trial_modes(model).add(model.training)


def _trial_modes(model: nn.Module) -> set[bool]:
    return vars(model).setdefault("modes_of_row_trial", set[bool]())


@contextmanager
def _clean_up_after_trial(model: nn.Module) -> Iterator[None]:
    with preserve_modes(model), torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext():
        try:
            yield
        finally:
            reshard(model)


class _Difference(NamedTuple):
    """The name of a module or value in which two passes differ.

    `error` and `tolerance` are relative to what it adds to rows; `comparison` says in words which rows were compared.
    """

    name: str
    error: float
    tolerance: float
    comparison: str


class _Trial:
    """The passes of a model, or of each stage that is here, and what differs between them."""

    def __init__(self, model: nn.Module, world: World) -> None:
        """Draw the rows of a trial's passes.

        The first pass has all rows. The second has the same rows next to others, and the third has fewer of them, in
        another order. The third shows every difference that the second does, unless products round coarsely: those of
        other shapes then round so differently that small differences are missed. Only then is the second made as well.
        """
        self.model, self.world = model, world
        self.stages: tuple[Any, ...] = model.stages if isinstance(model, PipelineModel) else (model,)
        rules = call_rules(model)
        self.first, *self.others = make_trial_rows(world, rules.row_multiple, rules.position_table)
        dtype = model_execution(model).compute_dtype
        if torch.is_autocast_enabled(world.device.type):
            dtype = torch.get_autocast_dtype(world.device.type)
        tf32 = world.device.type == "cuda" and dtype == torch.float32
        self.precision = Precision(dtype, tf32, has_experts(model))
        if not self.precision.rounds_coarsely:
            self.others = self.others[1:]
        self.values = _Values(model, world, self.first.parts)

    def find_differences(self, *, every_module: bool) -> list[_Difference]:
        return [
            difference
            for stage in self.stages
            for difference in self._yield_differences(stage, every_module=every_module)
        ]

    def refusal_error(self, differences: Sequence[_Difference]) -> ModelError:
        name, error, tolerance, comparison = differences[0]
        mode = "training" if self.model.training else "evaluation"
        architecture = call_rules(self.model).architecture
        return ModelError(
            f"{architecture} cannot run exactly over a sharded sequence: rows influence each other outside attention, "
            f"first in {name}: in {mode} mode {len(self.first.numbers)} rows, without attention, and {comparison} "
            f"beside others differ by {error:.1e} of what it makes of them, where {tolerance:.0e} is allowed. Have "
            "every module, patch and hook there make a row of that row alone, or leave it out"
            f"{doctor_hint(self.model)}"
        )

    def _yield_differences(self, stage: nn.Module, *, every_module: bool) -> Iterator[_Difference]:
        """One difference, of the first culprit, for each later pass of a stage in which rows have changed."""
        model = stage.model if isinstance(stage, Stage) else stage
        first_pass = self._run_stage(stage, self.first, None, every_module=every_module)
        for rows in self.others:
            same_shapes = len(rows.numbers) == len(self.first.numbers)
            comparison = "the same" if same_shapes else f"{len(rows.numbers)} of them in another order"
            observed = self._run_stage(stage, rows, first_pass, every_module=every_module)
            shares = observed.read_errors()
            tolerance = self.precision.tolerance(same_shapes=same_shapes)
            if (key := _first_culprit(shares)) is not None:
                name = _module_words(model, key.module)
                yield _Difference(name, shares[key] * tolerance, tolerance, comparison)

    def _run_stage(
        self, stage: nn.Module, rows: TrialRows, before: ObservedPass | None, *, every_module: bool
    ) -> ObservedPass:
        model: Any = stage.model if isinstance(stage, Stage) else stage
        observed = ObservedPass(rows, self.precision, before)
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        with _preserve_state(model), torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(0)
            for module in model.modules():
                module.training = module.training and not isinstance(module, nn.modules.dropout._DropoutNd)
            with observed.observe_calls(dict(model.named_modules()) if every_module else {}, decoder_layers(model)):
                self.values.run_pass(stage, observed)
        return observed


class _Values:
    """Token ids of the trial's rows, and hidden states for pipeline stages behind the first one.

    A row is known by its number. `ids` are (2, numbers): a compared row has the first id of its number in every pass,
    and in a pass with other neighbours the rows that are not compared have the second. `later` (2, numbers, depths) are
    the ids that depths of multi-token prediction read.
    """

    def __init__(self, model: Any, world: World, parts: int) -> None:
        self.device, self.dtype, self.shape = world.device, model.dtype, (2, COUNT * parts)
        self.width, vocabulary = (getattr(model.config.get_text_config(), n) for n in ("hidden_size", "vocab_size"))
        depths = model.depths if isinstance(model, PipelineModel) else len(model_depths(model))
        draw = torch.Generator().manual_seed(3)
        self.ids = torch.randint(vocabulary, self.shape, generator=draw).to(world.device)
        self.later = torch.randint(vocabulary, (*self.shape, depths), generator=draw).to(world.device)

    def run_pass(self, stage: nn.Module, observed: ObservedPass) -> None:
        rows = observed.rows
        ids, positions = rows.choose_values(self.ids)[None], rows.shard.position_ids[None]
        later = {"future_ids": rows.choose_values(self.later).t().contiguous()} if self.later.shape[2] else {}

        def note_hidden(hidden: Tensor, head: Callable[[Tensor], Tensor], *deeper: Tensor) -> Tensor:
            for name, x in (("the last hidden states", hidden), ("the logits", head(hidden))):
                observed.note_value(name, x)
            for depth, x in enumerate(deeper):
                observed.note_value(f"the hidden states of depth {depth + 1} of multi-token prediction", x)
            return hidden.new_zeros(())

        if not isinstance(stage, Stage):
            stage(input_ids=ids, position_ids=positions, shard=rows.shard, row_loss=note_hidden, **later)
            return

        def make_output(part: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
            return part(**arguments, row_loss=note_hidden, **later)

        x = ids if stage.first else self._make_hidden_states(stage, rows)
        out = stage(x, stage_input=StageInput(rows.shard, ids, make_output))
        if not stage.last:
            observed.note_value("the hidden states after its last layer", out.squeeze(0))

    def _make_hidden_states(self, stage: Stage, rows: TrialRows) -> Tensor:
        """The same (1, T, D) for a row's number in every pass; behind them embedded rows, if stages hand these on."""
        draw, inputs = torch.Generator().manual_seed(4), list[Tensor]()
        for _ in range(1 + stage.with_embedding):
            values = torch.randn(*self.shape, self.width, generator=draw).to(self.device, self.dtype)
            inputs.append(rows.choose_values(values).unflatten(0, (rows.parts, -1))[rows.part])
        return torch.cat(inputs)[None]


def _first_culprit(shares: Mapping[Key, float]) -> Key | None:
    """Find the first module whose outputs differ while its inputs do not; or else the first difference.

    `shares` are errors as shares of the tolerance, in the order of the pass: above 1 rows have changed. None if no row
    has changed.
    """
    different = [key for key, share in shares.items() if share > 1]
    with_other_inputs = {(key.module, key.call) for key in different if not key.out}
    culprits = [key for key in different if key.out and (key.module, key.call) not in with_other_inputs]
    return next(iter(culprits or different), None)


def _module_words(model: nn.Module, name: str) -> str:
    modules = dict(model.named_modules())
    kind = type(modules[name]).__name__.removeprefix("FSDP") if name in modules else ""
    return f"{name} ({kind})" if name and kind else name or kind


@contextmanager
def _preserve_state(model: nn.Module) -> Iterator[None]:
    values = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
    try:
        with preserve_attributes(model):
            yield
    finally:
        for buffer, version, value in values:
            if buffer._version != version:
                buffer.copy_(value)
