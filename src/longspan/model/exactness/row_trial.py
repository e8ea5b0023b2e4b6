"""The trial of a prepared model before its first step: whether it computes each row by itself outside attention.

Over a sharded sequence a rank has some of the rows, in an order of its own, and packed documents stand next to each
other. So the result of a row must not depend on others, except through attention and mixers, which know the shard. The
model itself, with its patches, hooks, weights, type and home, runs a few rows, then the same rows next to others, then
some of them in another order, without gradients and without attention (`SeparateRows`). What each layer does
to them is compared (`observed_pass.py`). All ranks do so together, as parameters and experts may be spread over them;
stages of a pipeline do so by themselves, from random hidden states. It happens once in training mode and once in
evaluation mode, before the first step that runs so, and leaves nothing behind.

Not covered: effects that only long documents show, gradients (of classes: `class_trial.py`), encoders, dropout.
(Only an adapter may drop out in training: each rank draws for its own rows.)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longspan.comm import SequenceShard, World, raise_first_error, world_of
from longspan.errors import ModelError
from longspan.model.compiled_layers import is_compiled
from longspan.model.exactness.observed_pass import COUNT, Key, ObservedPass, Precision, TrialRows, make_trial_rows
from longspan.model.execution import model_execution
from longspan.model.layers import decoder_layers, has_experts
from longspan.model.mtp.depths import model_depths
from longspan.model.parts import preserve_modes
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.pipeline.stages import Stage, StageInput
from longspan.model.seams.attention_calls import SeparateRows
from longspan.model.seams.call_rules import call_rules, is_prepared
from longspan.model.seams.meta_pass import preserve_attributes
from longspan.model.seams.refusals import doctor_hint
from longspan.model.sharding import reshard


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
