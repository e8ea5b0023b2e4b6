"""A run on GPUs that words name: its checked keys, its model, and the facts that decide. No GPU, no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from longspan.cli.plans.gpus import Gpus, bytes_unknown_text
from longspan.config.memory_keys import check_gpu_memory_limit
from longspan.config.sections import ModelConfig, RunConfig
from longspan.errors import ConfigError, PlanError
from longspan.layout import Layout
from longspan.model.presets import PRESETS, find_published_preset
from longspan.plan import MemoryBudget
from longspan.plan.memory.settings import GPU_SHARE, HOST_SHARE
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.model_shape import ModelShape, experts_missing_text, read_experts
from longspan.plan.shape.positions import can_scale_positions, position_limit, smallest_scaling_factor
from longspan.resolve.facts import Facts
from longspan.resolve.planner_config import home_of
from longspan.resolve.run_cost import planned_teacher
from longspan.resolve.ways import BindingKeys
from longspan.run.checks import (
    check_distillation,
    check_keys_needed_by_keys,
    check_model_keys,
    check_parallel,
    check_plans,
    check_precision,
)
from longspan.train.optim.state_numbers import optimizer_state_numbers


@dataclass(frozen=True)
class GpuRun:
    """A run of a configuration on GPUs. `model` is what sizes are read from: a folder, or the values of a
    configuration. `given_keys` are the keys that a question gives, `given` says which choices they decide. With
    `keeps_rows` the rows of a slot are those that the run's folder keeps, if any.
    """

    config: RunConfig
    gpus: Gpus
    model: Any
    given_keys: frozenset[str] = frozenset()
    given: BindingKeys = field(default_factory=BindingKeys)
    keeps_rows: bool = False

    @classmethod
    def with_model(cls, config: RunConfig, gpus: Gpus) -> "GpuRun":
        """Make the run of a configuration on these GPUs, with its model: a folder or file, or the values of a preset.

        Raises ConfigError, LayoutError or PlanError for keys that do not fit together or these GPUs, and for a model
        whose sizes are not known.
        """
        check_model_keys(config, training=False)  # optimizer.lr may be left out, as nothing is trained here
        home = home_of(config.parallel, gpus.count)
        check_precision(config)
        check_keys_needed_by_keys(config)
        check_distillation(config)
        check_gpu_memory_limit(config.train)
        check_parallel(home)
        # An answer is about steps of training: their plans are checked, and those of the held-out documents (unless
        # evaluation.documents is 0), but not those of named evaluation sets.
        check_plans(config.with_sets(()), home, training=True)
        model: Any = config.model.source
        preset_name = find_published_preset(model) if model else config.model.preset_name
        if preset_name:
            preset = PRESETS[preset_name]
            # a preset without a vocabulary gets an embedding row for each id of the run's tokenizer
            model = {"model_type": preset.model_type, "vocab_size": config.data.vocab_size, **preset.values}
        # The run draws whole weights of a configuration, also where its folder has them in 4 or 8 bits.
        if config.model.config and (read := ConfigReader.read_whole_model(model)).quantization_settings():
            model = read.values_without_quantization()
        ModelShape.of(model, mtp_layers=config.mtp.num_layers)  # raises for a model without sizes
        # The words are those of a run that has loaded the model.
        experts = read_experts(model)
        if home.ep > 1 and not (experts.of_layer and experts.shared):
            read = ConfigReader.read_whole_model(model)
            classes = read.value("architectures") or [read.model_type or read.where]
            raise PlanError(experts_missing_text(home.ep, str(classes[0]), experts))
        return cls(config, gpus, model)

    @property
    def teacher(self) -> Any:
        """What the teacher's sizes are read from, as `model`."""
        path = self.config.teacher.path
        preset = find_published_preset(path)
        return {"model_type": PRESETS[preset].model_type, **PRESETS[preset].values} if preset else path

    @property
    def home(self) -> Layout:
        return home_of(self.config.parallel, self.gpus.count)

    @property
    def budget(self) -> MemoryBudget | None:
        """What a GPU and its share of the host may be filled with; None where the bytes of a GPU are not known."""
        device = self.config.train.device_memory_limit or int(GPU_SHARE * (self.gpus.bytes or 0))
        return MemoryBudget(device=device, host=int(HOST_SHARE * self.gpus.host_bytes)) if device else None

    def known_budget(self) -> MemoryBudget:
        """Return the budget. Raises ConfigError where it is not known."""
        if self.budget is None:
            raise ConfigError(bytes_unknown_text(f"--machine {self.config.run.machine}", self.gpus.machine))
        return self.budget

    def facts(self, lengths_of_step: Callable[[int], Sequence[int]], steps: int, **more: Any) -> Facts:
        """Return the facts that decide for so many steps, of documents of these lengths; `more` are further fields of
        Facts, by name.
        """
        config = self.config
        teacher = planned_teacher(config, self.teacher, gpu=True) if config.distils else None
        return Facts(
            home=self.home,
            machine=self.gpus.machine,
            model=self.model,
            lengths_of_step=lengths_of_step,
            steps=steps,
            teacher=teacher,
            budget=self.budget,
            state_numbers=optimizer_state_numbers(
                config.optimizer, lora=config.lora.rank > 0, dtype=config.model.dtype
            ),
            **more,
        )

    def facts_of_step(self, lengths: Sequence[int]) -> Facts:
        """The facts of one step of these documents."""
        return self.facts(lambda step: lengths, 1, longest=max(lengths))


def choose_position_scaling(config: RunConfig, model: Any, longest: int) -> RunConfig:
    """Return the configuration with model.rope_scaling "yarn" where a document needs it, the key is not given, and the
    model can be scaled.
    """
    limit = position_limit(model)
    if limit is None or longest <= limit or config.model.rope_scaling or not can_scale_positions(model):
        return config
    return config.with_keys("model", rope_scaling="yarn")


def position_notes(config: RunConfig, facts: Facts, longest: int) -> Iterator[str]:
    """Yield what an answer says about a document of `longest` tokens, if the model or its teacher has fewer
    positions.
    """
    yield from _position_notes(config.model, facts.model, longest)
    if facts.teacher is not None:
        yield from _position_notes(config.teacher.as_model(), facts.teacher.config, longest)


def _position_notes(keys: ModelConfig, model: Any, longest: int) -> Iterator[str]:
    limit = position_limit(model)
    if limit is None or longest <= limit:
        return
    key = f"{keys.prefix}rope_scaling"
    text = f"the {keys.SECTION} knows {limit:,} positions (max_position_embeddings), fewer than {longest:,}"
    if keys.rope_scaling:
        factor = keys.rope[1] or smallest_scaling_factor(model, longest)
        yield f"{text}: {key} = {keys.rope_scaling!r} stretches them {factor:g} times"
    elif can_scale_positions(model):
        yield f"{text}: {key} = 'yarn' stretches them, and without it longspan train refuses longer documents"
    else:
        yield f"{text}, and {key} cannot stretch them: longspan train refuses longer documents"
