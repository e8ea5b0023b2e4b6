"""The trial of a prepared model before its first step: whether it computes each row by itself outside attention.

Over a sharded sequence a rank has some of the rows, in an order of its own, and packed documents stand beside each
other. So what a row becomes must not depend on others but through attention and mixers, which know the shard. The model
that was given, with its patches, hooks, weights, type and home, runs a few rows (`trial_rows.py`), the same ones beside
others and in another number and order, without gradients and without attention (`seams/rows_alone.py`), and what each
layer makes of them is compared (`observed_pass.py`). All ranks do so together, as parameters and experts may be spread
over them; stages of a pipeline by themselves, from made-up hidden states. It is done once in training mode and once in
evaluation mode, before the first step that runs so, and leaves nothing behind.

Not covered: what a model does to long documents alone, gradients (of classes: `class_trial.py`), encoders, dropout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longspan.comm import SequenceShard, World, raise_first_error, world_of
from longspan.errors import ModelError
from longspan.model.exactness.class_trial import has_experts
from longspan.model.exactness.observed_pass import COUNT, Key, ObservedPass, Precision, TrialRows, rows_beside_others
from longspan.model.execution import execution_of
from longspan.model.layers import decoder_layers
from longspan.model.mtp.depths import depths_of
from longspan.model.parts import modes_restored
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.pipeline.stages import Stage, StageInput
from longspan.model.placement.sharding import reshard
from longspan.model.seams.call_rules import call_rules, is_prepared
from longspan.model.seams.meta_pass import attributes_restored
from longspan.model.seams.refusals import doctor_hint
from longspan.model.seams.separate_rows import RowsAlone


def try_rows(model: nn.Module, world: World, *, backward: bool) -> None:
    """Before a prepared model's first step in a mode: raise ModelError, on every rank, where rows influence each other.

    Entered by all ranks together. A step without `backward` runs in evaluation mode.
    """
    if not is_prepared(model) or backward in _modes_tried(model):
        return
    trial = _Trial(model, world)
    with _left_as_it_was(model), world.watch.naming("trial of rows outside attention", world.home.ranks):
        if not (backward and model.training):
            model.train(backward)
        differences = trial.differences(every_module=False)
        if world.control.any_rank(bool(differences)):
            named = trial.differences(every_module=True)  # by all ranks together
            differences = named or differences
            raise_first_error(world, trial.refusal(differences) if differences else None)
    _modes_tried(model).add(backward)


def try_rows_of_calls(model: nn.Module) -> None:
    """Try a prepared model before its first call in a mode, where no step has: in loops of one's own."""
    model.register_forward_pre_hook(_before_call, prepend=True, with_kwargs=True)


def _before_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Ranks that the call needs are in it, and see the same: nothing more is sent than by passes of the model."""
    shard = kwargs.get("shard")
    if model.training in _modes_tried(model) or isinstance(shard, RowsAlone) or not isinstance(shard, SequenceShard):
        return
    trial = _Trial(model, world_of(shard.world_key))
    with _left_as_it_was(model):
        if differences := trial.differences(every_module=False):
            raise trial.refusal(differences)
    _modes_tried(model).add(model.training)


def _modes_tried(model: nn.Module) -> set[bool]:
    """In which modes, training or not, a prepared model has passed."""
    return vars(model).setdefault("modes_of_row_trial", set[bool]())


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Modes of modules and what FSDP2 has gathered are afterwards as before; nothing is compiled, or dropped, inside.

    Dropout is an adapter's, which each rank draws for its own rows: other models that drop out in training are refused.
    """
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    with modes_restored(model), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        try:
            yield
        finally:
            reshard(model)


class _Difference(NamedTuple):
    """Of a module, or a value in words: by how much of what it adds to rows they differ, and in which passes."""

    name: str
    error: float
    allowed: float
    beside: str


class _Trial:
    """The passes of a model, or of each stage that is here, and what differs between them."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model, self.world = model, world
        self.stages: tuple[Any, ...] = model.stages if isinstance(model, PipelineModel) else (model,)
        rules = call_rules(model)
        self.first, *self.others = rows_beside_others(world, rules.row_multiple, rules.position_table)
        dtype = execution_of(model).compute_dtype
        if torch.is_autocast_enabled(world.device.type):
            dtype = torch.get_autocast_dtype(world.device.type)
        tf32 = world.device.type == "cuda" and dtype == torch.float32
        self.precision = Precision(dtype, tf32, has_experts(model))
        if not self.precision.half:
            self.others = self.others[1:]  # one pass shows all
        self.values = _Values(model, world, self.first.parts)

    def differences(self, *, every_module: bool) -> list[_Difference]:
        """What is not the same in all passes, with the culprit first; of layers alone, or of `every_module`."""
        return [
            difference for stage in self.stages for difference in self._differences(stage, every_module=every_module)
        ]

    def refusal(self, differences: Sequence[_Difference]) -> ModelError:
        """Why this rank's part of the model is refused, by the first difference."""
        name, error, allowed, beside = differences[0]
        architecture = call_rules(self.model).architecture
        mode = "training" if self.model.training else "evaluation"
        return ModelError(
            f"{architecture} cannot run exactly over a sharded sequence: rows influence each other outside attention, "
            f"first in {name}: in {mode} mode {len(self.first.numbers)} rows, without attention, and {beside} differ "
            f"by {error:.1e} of what it makes of them, where {allowed:.0e} is allowed. Have every module, patch and "
            "hook there make a row of that row alone, or leave it out"
            f"{doctor_hint(self.model)}"
        )

    def _differences(self, stage: nn.Module, *, every_module: bool) -> Iterator[_Difference]:
        model = stage.model if isinstance(stage, Stage) else stage
        first = self._run(stage, self.first, None, every_module=every_module)
        for rows in self.others:
            same = len(rows.numbers) == len(self.first.numbers)
            beside = "the same beside others" if same else f"{len(rows.numbers)} of them in another order beside others"
            observed = self._run(stage, rows, first, every_module=every_module)
            shares = observed.worst()
            allowed = self.precision.allowed(same_shapes=same)
            if (key := _culprit(shares)) is not None:
                yield _Difference(_named(model, key.module), shares[key] * allowed, allowed, beside)

    def _run(
        self, stage: nn.Module, rows: TrialRows, before: ObservedPass | None, *, every_module: bool
    ) -> ObservedPass:
        model: Any = stage.model if isinstance(stage, Stage) else stage
        observed = ObservedPass(rows, self.precision, before)
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        with _state_restored(model), torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(0)
            for module in model.modules():
                module.training = module.training and not isinstance(module, nn.modules.dropout._DropoutNd)
            with observed.observing(dict(model.named_modules()) if every_module else {}, decoder_layers(model)):
                self.values.run(stage, observed)
        return observed


class _Values:
    """Token ids of rows by their numbers, and hidden states for stages behind the first one."""

    def __init__(self, model: Any, world: World, parts: int) -> None:
        self.device, self.dtype, self.numbers = world.device, model.dtype, (2, COUNT * parts)
        self.width, vocabulary = (getattr(model.config.get_text_config(), n) for n in ("hidden_size", "vocab_size"))
        depths = model.depths if isinstance(model, PipelineModel) else len(depths_of(model))
        draw = torch.Generator().manual_seed(3)
        self.ids = torch.randint(vocabulary, self.numbers, generator=draw).to(world.device)
        self.later = torch.randint(vocabulary, (*self.numbers, depths), generator=draw).to(world.device)

    def run(self, stage: nn.Module, observed: ObservedPass) -> None:
        """One pass through a model, or a stage of one."""
        rows = observed.rows
        ids, positions = rows.choose(self.ids)[None], rows.shard.position_ids[None]
        later = {"future_ids": rows.choose(self.later).t().contiguous()} if self.later.shape[2] else {}

        def note(hidden: Tensor, head: Callable[[Tensor], Tensor], *deeper: Tensor) -> Tensor:
            for name, x in (("the last hidden states", hidden), ("the logits", head(hidden))):
                observed.note(name, x)
            for depth, x in enumerate(deeper):
                observed.note(f"the hidden states of depth {depth + 1} of multi-token prediction", x)
            return hidden.new_zeros(())

        if not isinstance(stage, Stage):
            stage(input_ids=ids, position_ids=positions, shard=rows.shard, row_loss=note, **later)
            return

        def make_output(part: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
            return part(**arguments, row_loss=note, **later)

        x = ids if stage.first else self._hidden(stage, rows)
        out = stage(x, stage_input=StageInput(rows.shard, ids, make_output))
        if not stage.last:
            observed.note("the hidden states after its last layer", out.squeeze(0))

    def _hidden(self, stage: Stage, rows: TrialRows) -> Tensor:
        """Hidden states (1, T, D) that no stage made; with the embedding behind them, (1, 2T, D)."""
        draw, made = torch.Generator().manual_seed(4), list[Tensor]()
        for _ in range(1 + stage.with_embedding):
            values = torch.randn(*self.numbers, self.width, generator=draw).to(self.device, self.dtype)
            made.append(rows.choose(values).unflatten(0, (rows.parts, -1))[rows.part])
        return torch.cat(made)[None]


def _culprit(shares: Mapping[Key, float]) -> Key | None:
    """The first module that differs where what went into it does not; or what differs first."""
    different = [key for key, share in shares.items() if share > 1]
    calls = {(key.module, key.call) for key in different if not key.out}
    made = [key for key in different if key.out and (key.module, key.call) not in calls]
    return next(iter(made or different), None)


def _named(model: nn.Module, name: str) -> str:
    modules = dict(model.named_modules())
    kind = type(modules[name]).__name__.removeprefix("FSDP") if name in modules else ""
    return f"{name} ({kind})" if name and kind else name or kind


@contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
    """What a pass leaves in buffers and attributes of modules is taken back."""
    values = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
    try:
        with attributes_restored(model):
            yield
    finally:
        for buffer, version, value in values:
            if buffer._version != version:
                buffer.copy_(value)
