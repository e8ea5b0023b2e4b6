"""A model under a home with pipeline stages: this rank's stages under the names of the whole model, and their steps.

Optimizers, checkpoints and saved folders so do not depend on the pipeline. A model is cut in `stages.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from longspan.comm import SequenceShard, World, world_of
from longspan.comm.watch import is_backend_error
from longspan.errors import ModelError
from longspan.model.feature import Call, Feature
from longspan.model.fsdp_params import leave_out_idle_hooks, reshard
from longspan.model.kinds import router_sizes, score_columns
from longspan.model.layers import Absent, decoder_model, mtp_depths, text_model_name
from longspan.model.parts import find_parts
from longspan.model.pipeline.schedules import PipelineSettings, ScheduledStage, make_schedule
from longspan.model.pipeline.stages import (
    Stage,
    StageCopies,
    StageInput,
    cut_stages_of_position,
    refuse_dependent_layers,
    refuse_inexact_stages,
)
from longspan.model.seams.call_rules import call_rules
from longspan.model.seams.row_loss import add_row_loss
from longspan.plan.memory.model_numbers import stage_layers


def add_named_modules(into: nn.Module, models: list[PreTrainedModel], copies: StageCopies) -> None:
    """Give `into` the modules of a rank's stages as children, by their names in the whole model."""
    for name, module in copies.modules_of_other_stages.items():
        *outer_names, last = name.split(".")
        node = into
        for name_part in outer_names:
            node = _get_or_add_child(node, name_part)
        node.add_module(last, module)
    for model in models:
        _merge_children(into, model, _modules_around_layers(model))


def _merge_children(into: nn.Module, source: nn.Module, around: set[nn.Module]) -> None:
    """Modules `around` layers are not shared by stages: they are merged child by child."""
    for name, child in source.named_children():
        if child in around:
            _merge_children(_get_or_add_child(into, name), child, around)
        elif not isinstance(child, Absent) and name not in into._modules:
            into.add_module(name, child)


def _get_or_add_child(node: nn.Module, name: str) -> nn.Module:
    if name not in node._modules:
        node.add_module(name, nn.Module())
    return node.get_submodule(name)


def _modules_around_layers(model: PreTrainedModel) -> set[nn.Module]:
    """Each stage has a copy of its own of these."""
    path = text_model_name(model).split(".")
    outer = {model.get_submodule(".".join(path[: i + 1])) for i in range(len(path))}
    return {*outer, getattr(decoder_model(model), find_parts(model).layers)}


class PipelineModel(nn.Module):
    """This rank's stages of a causal language model; train and evaluate it with `run_step`.

    Parameters, buffers and `state_dict` keys have the names of the whole model. Together, the ranks of a pipeline hold
    each parameter once; one that several stages have, such as a tied embedding, is on each rank with such a stage.

    >>> model = prepare(Qwen3ForCausalLM(config), world, virtual_stages=2)  # a PipelineModel: home.pp is 2
    >>> logits = model(input_ids=ids[None], position_ids=shard.position_ids[None], shard=shard).logits  # (1, T, V)

    Call it only to look at logits: all stages of a slot enter with the same rows, every rank gets the logits, and they
    carry no gradient. `dtype` is that of hidden states between stages.
    """

    # `is_pipeline` knows it by this attribute.
    holds_stages = True

    def __init__(
        self,
        model: PreTrainedModel,
        world: World,
        stages: Sequence[Stage],
        pipeline_settings: PipelineSettings,
        dtype: torch.dtype,
    ) -> None:
        """Take this rank's stages.

        They are in a tuple, as in a ModuleList their parameters would have a second name; `_unnamed` holds modules
        without a name in the whole model.
        """
        super().__init__()
        self.training: bool = model.training
        # What the whole model is, whatever stages are here.
        self.architecture: type[PreTrainedModel] = type(model)
        self.config: PreTrainedConfig = model.config
        self.generation_config: GenerationConfig | None = getattr(model, "generation_config", None)
        self.stages: tuple[Stage, ...] = tuple(stages)
        # The layers are those of all stages, whichever are here.
        self.layers_of_stages: tuple[range, ...] = self.stages[0].layers_of_stages
        self.pipeline_settings: PipelineSettings = pipeline_settings
        self.dtype: torch.dtype = dtype
        self.copies: StageCopies = StageCopies(
            self.stages[0].shared,
            {stage.index: stage.model for stage in self.stages},
            pipeline_settings.pp,
            world.coordinates.pp,
        )
        # The world is looked up by its key: modules store no process group.
        self._world_key = world.key
        _ = world.channels.pipeline  # makes its group, on all ranks together
        self.vocabulary_size: int = model.config.get_text_config().vocab_size
        self.routers: tuple[int, ...] = router_sizes(model)
        # Depths of multi-token prediction are on the last stage.
        self.depths: int = len(mtp_depths(model))
        self._schedules: dict[tuple[int, bool], tuple[Callable[[], None], list[ScheduledStage]]] = {}
        add_named_modules(self, [stage.model for stage in self.stages], self.copies)
        self._unnamed = dict[str, nn.Module]()
        for stage in self.stages:
            around_layers = {stage, stage.model, *_modules_around_layers(stage.model)}
            for name, module in stage.named_modules():
                if module in around_layers:
                    self._unnamed[f"stages.{stage.index}.{name}".rstrip(".")] = module

    def named_modules(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[Any]:
        """Yield the modules by their names in the whole model, then those without one, for FSDP2, such as stages."""
        memo = set[nn.Module]() if memo is None else memo
        yield from super().named_modules(memo, prefix, remove_duplicate)
        for name, module in self._unnamed.items():
            if module not in memo:
                memo.add(module)
                yield f"{prefix}{'.' if prefix else ''}{name}", module

    def train(self, mode: bool = True) -> "PipelineModel":
        """Set the mode of all stages, and of this module and its children, which may be in no stage."""
        for stage in self.stages:
            stage.train(mode)
        super().train(mode)
        return self

    @property
    def reads_tokens(self) -> bool:
        """Whether a stage of this rank needs token ids (the first) or labels (the last)."""
        return any(stage.first or stage.last for stage in self.stages)

    def run_micro_batches(self, inputs: Sequence[StageInput], *, backward: bool) -> None:
        """Run one step: every micro-batch through every stage, and back with `backward`, which adds to `.grad`.

        All ranks enter with as many inputs, to whose keywords the model's kernel is added. CommError names a rank that
        does not answer; ModelError for a shard that the model cannot take (`CallRules.check_shard`).
        """
        for stage_input in inputs:
            call_rules(self).check_shard(stage_input.shard)
        world = world_of(self._world_key)
        with self.copies.sum_copied_gradients(world) if backward else nullcontext():
            step, stages = self._find_or_make_schedule(len(inputs), backward=backward)
            for stage_input in inputs:
                stage_input.keywords = call_rules(self).add_kernel_argument(stage_input.keywords)
            for stage in stages:
                stage.inputs = inputs
            try:
                with leave_out_idle_hooks(self, trains=backward):
                    _run_watched_schedule(step, world)
            except BaseException:
                # In the next step, torch's interleaved schedules would take their stages for gathered.
                self._schedules.clear()
                raise
            finally:
                for stage in stages:
                    stage.drop_step_state()
        if not backward:
            reshard(self)

    def _find_or_make_schedule(
        self, micro_batches: int, *, backward: bool
    ) -> tuple[Callable[[], None], list[ScheduledStage]]:
        """Later steps of as many micro-batches take it again."""
        key = (micro_batches, backward)
        if key not in self._schedules:
            world = world_of(self._world_key)
            hidden = self.config.get_text_config().hidden_size
            # The row multiple is tp if tensor-parallel ranks hold parts of the rows of hidden states, else 1.
            parts = call_rules(self).row_multiple
            stages = [
                ScheduledStage(stage, world, hidden_size=hidden, dtype=self.dtype, row_parts=parts)
                for stage in self.stages
            ]
            step = make_schedule(self.pipeline_settings, stages, micro_batches, backward=backward)
            self._schedules[key] = step, stages
        return self._schedules[key]

    @torch.no_grad()
    def forward(self, *, input_ids: Tensor, position_ids: Tensor, shard: SequenceShard, **kwargs: Any) -> Any:
        """Compute logits (1, T, V) of one micro-batch's local rows, on every rank of the pipeline; no gradient.

        Raises ModelError for positions that are not the shard's.
        """
        # Layers get positions of several axes (images), as the shard has those of one axis.
        if position_ids.ndim == 3:
            kwargs["position_ids"] = position_ids
        elif not torch.equal(position_ids[0], shard.position_ids):
            raise ModelError("position_ids are not those of the shard; use position_ids=shard.position_ids[None]")
        logits: list[Tensor] = []

        def make_output(model: nn.Module, arguments: Any) -> Tensor:
            """Keep the logits of the last stage, and return a scalar in place of a loss."""
            logits.append(model(**arguments).logits)
            return logits[0].new_zeros((), dtype=torch.float64)

        # each stage sets `use_cache` itself
        keywords = {name: value for name, value in kwargs.items() if name != "use_cache"}
        self.run_micro_batches([StageInput(shard, input_ids, make_output, keywords)], backward=False)
        pipeline = world_of(self._world_key).channels.pipeline
        last = self.pipeline_settings.pp - 1
        sends = list[tuple[int, Tensor]]()
        receives = list[tuple[int, Tensor]]()
        if pipeline.index == last:
            all_logits = logits[0].to(self.dtype).contiguous()
            sends = [(place, all_logits) for place in range(pipeline.degree) if place != last]
        else:
            columns = score_columns(self) or self.vocabulary_size
            all_logits = torch.empty(1, shard.local_rows, columns, dtype=self.dtype, device=shard.device)
            receives = [(last, all_logits)]
        pipeline.exchange(sends, receives, "logits to all stages").wait()
        return CausalLMOutput(logits=all_logits)


class PipelineFeature(Feature):
    """A model cut into stages."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._settings = PipelineSettings(
            self.options.pipeline_schedule, self.world.home.pp, self.options.virtual_stages
        )

    def cut(self, model: PreTrainedModel) -> Sequence[tuple[nn.Module, PreTrainedModel]]:
        """Cut a model into this rank's stages, and free all other parameters; () for a home without a pipeline.

        Returns (stage, its model) of each. That model is a copy without the forward that takes `row_loss`: it is set
        anew on the last stage, where the head is. ModelError or PlanError, before any change, where stages would not be
        exact, or have too few layers.
        """
        if self._settings.pp == 1:
            return ()
        self._dtype = self.options.sharding(self.world).compute_dtype_of(model)
        parts = find_parts(model)
        layers = stage_layers(len(getattr(decoder_model(model), parts.layers)), self._settings.stages)
        refuse_inexact_stages(model, parts)
        refuse_dependent_layers(model, parts, layers)
        stages = cut_stages_of_position(model, parts, layers, self._settings.pp, self.world.coordinates.pp)
        for stage in stages:
            if stage.last:
                add_row_loss(stage.model, tried=True)
        return [(stage, stage.model) for stage in stages]

    def join(self, prepared: Any, roots: Sequence[Any]) -> nn.Module:
        """Return this rank's stages as one PipelineModel."""
        if self._settings.pp == 1:
            return prepared
        return PipelineModel(prepared, self.world, roots, self._settings, self._dtype)


def _run_watched_schedule(step: Callable[[], None], world: World) -> None:
    """Errors of a collective, or of no stage, are raised inside the watch, which adds its report of the ranks."""
    failure: BaseException | None = None
    with world.watch.enter_operation("pipeline of micro-batches", world.channels.pipeline.ranks, is_work=True):
        try:
            step()
        except RuntimeError as error:
            failure = error.__cause__
            # torch may put several errors around one another, each of which only names the stage that failed.
            while failure is not None and failure.__cause__ is not None and "stage" in str(failure).lower():
                failure = failure.__cause__
            if failure is None or is_backend_error(failure):
                raise (failure or error) from error
    if failure is not None:
        raise failure
