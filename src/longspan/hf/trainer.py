"""`with_longspan(TrainerClass)`: a Trainer of transformers or TRL whose ranks share documents by longspan's plans."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

import longspan
from longspan.comm import World
from longspan.comm.all_ranks import is_first_rank, run_on_first_rank
from longspan.config.keys import AUTO
from longspan.config.sections import LoraSection, OptimizerSection, RunConfig
from longspan.errors import CheckpointError, ConfigError, ModelError, plural
from longspan.hf.arguments import LongspanArguments, errors_in_words_of_scripts
from longspan.hf.facade import Facade, take_fused_head
from longspan.hf.files import FilesPart
from longspan.hf.generation import GenerationPart, refuse_generation
from longspan.hf.one_process import OneAccelerator, OneProcess
from longspan.hf.preferences import PreferencesPart, ReferenceAdapter, clear_device_map, take_reference_adapter
from longspan.hf.refusals import (
    ONE_PASS_OPTIMIZERS,
    PAGED,
    is_score_model,
    optimizer_name,
    refusals_of_arguments,
    refuse_made_model,
    refuse_model_kind,
    refuse_search,
)
from longspan.hf.steps import EvaluationPart, StepsPart
from longspan.layout import Layout
from longspan.model.adapters import find_adapter
from longspan.model.frozen.formats.modules import holds_codes
from longspan.model.kinds import unwrap_peft_model, waits_on_host
from longspan.model.layers import architecture_name
from longspan.model.lora import redirect_peft_model
from longspan.model.prepared import PrepareOptions
from longspan.model.replaced_parameters import refuse_other_parameters
from longspan.model.seams.call_rules import guard_prepared_model
from longspan.plan import MemoryPlan
from longspan.resolve.resolved import Resolved, set_usual_mode
from longspan.resolve.run_cost import find_run_cost
from longspan.run.world_facts import gather_facts, resolve_on_ranks
from longspan.train import PlannerConfig, offload_optimizer_states
from longspan.train.optim.eight_bit_adamw import EightBitAdamW
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.training import options_of_memory_plan

CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # the second is the older name
OPTIMIZERS = {"sgd": "torch.optim.SGD", "adagrad": "torch.optim.Adagrad", "rmsprop": "torch.optim.RMSprop"}
MOST_ROWS = 4096  # of a dataset with columns, whose lengths are looked at: the first
DRAWN_STEPS = 64
FEW_ROWS = 256  # of another one, which may read files: at equal distances
_log = logging.getLogger(__name__)


def asks_for_recomputation(args: Any) -> bool:
    return any(getattr(args, name, None) for name in CHECKPOINTING)


def resolve_trainer(trainer: Any) -> Resolved:
    """Decide what the keys of a trainer leave open, by the lengths of its documents; entered by all ranks.

    A plan of memory is made on GPUs, and on CPUs if `device_memory_limit` is set; not if `plan_memory` is false or the
    user asked for recomputation. TRL asks for it by default, so only arguments that differ from their class's default
    count as the user's. Without a plan of memory rows of a slot that are "auto" become 0 (no limit). If no length of a
    document is known, planner and degree stay open: each step gets a dynamic plan, or the fewest slots that hold its
    documents.
    """
    config = _run_config(trainer)
    args = trainer._stock_arguments
    default = {key.name: key.default for key in fields(args)}
    if asks_for_recomputation(args) and any(
        getattr(args, name, None) != default.get(name) for name in CHECKPOINTING
    ):
        config = config.with_keys("train", plan_memory=False, activation_checkpointing="full")
    world = trainer.world
    model = unwrap_peft_model(trainer.model).config
    lengths = _lengths_of_documents(trainer)
    gpu = world.device.type == "cuda"
    if config.context.max_tokens_per_slot == AUTO and not (lengths and (gpu or config.train.device_memory_limit)):
        config = config.with_keys("context", max_tokens_per_slot=0)
    if not lengths:
        cost = find_run_cost(config, model, _log.info, gpu=gpu, slots=world.home.slots)
        return Resolved(set_usual_mode(config), None, cost)
    # Steps with lengths drawn at random stand for all steps.
    batch = trainer.args  # of all ranks
    rows_of_step = batch.per_device_train_batch_size * batch.gradient_accumulation_steps

    def lengths_of_step(step: int) -> list[int]:
        return np.random.default_rng(step).choice(np.asarray(lengths), rows_of_step).tolist()

    facts = gather_facts(config, world, model, lengths_of_step, DRAWN_STEPS, longest=max(lengths))
    return resolve_on_ranks(config, facts, world, _log.info)


def options_of_prepare(trainer: Any, model: Any, memory: MemoryPlan | None, *, training: bool) -> PrepareOptions:
    """Return the options of `prepare` by a Trainer's arguments; without `training` those of a reference, which takes no
    step. What a plan of memory chose takes the place of the keys of memory.
    """
    args = trainer._stock_arguments
    config = trainer.longspan.config()
    computes_in = torch.bfloat16 if args.mixed_precision == "bf16" else None  # of `accelerate launch` too
    options = PrepareOptions(
        reshard_after_forward=config.parallel.reshard_after_forward,
        sync_each_batch=config.parallel.sync_each_batch,
        sequence_parallel=config.parallel.sequence_parallel,
        attention_kernel=config.context.attention_kernel or None,
        compute_dtype=None if unwrap_peft_model(model).dtype == computes_in else computes_in,
    )
    if not training:
        return options
    by_arguments = replace(
        config.train, activation_checkpointing="full" if asks_for_recomputation(args) else "none"
    )
    measures = options_of_memory_plan(replace(config, train=by_arguments), memory, training=True)
    frozen = config.model.frozen
    if frozen == AUTO:
        frozen = "stored" if holds_codes(model) else "whole"
    return replace(options, compiled=config.train.compile, frozen=frozen, **measures)


def _run_config(trainer: Any) -> RunConfig:
    # An optimizer that only `optimizer_cls_and_kwargs` names is not read: that of args.optim stands for it. A plan of
    # memory does not depend on the learning rate.
    config = trainer.longspan.config()
    args = trainer._stock_arguments
    model = unwrap_peft_model(trainer.model)
    dtype = str(model.dtype).removeprefix("torch.")
    computes_in = "bfloat16" if args.mixed_precision == "bf16" else dtype
    model_keys = replace(config.model, dtype=dtype, compute_dtype=computes_in)
    asked = optimizer_name(args)
    name = "adamw" if asked in ONE_PASS_OPTIMIZERS else OPTIMIZERS.get(asked, "torch.optim.AdamW")
    config = config.with_keys("train", offload_optimizer_states=asked == PAGED)
    optimizer = OptimizerSection(class_=name, lr=1e-3)
    if asked in ONE_PASS_OPTIMIZERS and asked != PAGED:
        optimizer = replace(optimizer, moments="8bit")
    lora = LoraSection()
    if (adapter := find_adapter(model)) is not None:
        modules = getattr(adapter.config, "target_modules", None)  # a string is a pattern; () is the default
        targets = [] if isinstance(modules, str) else [*(modules or ())]
        if targets:
            parameters = getattr(adapter.config, "target_parameters", None) or ()
            targets += [f"experts.{name.rpartition('.')[2]}" for name in parameters]
        lora = replace(lora, rank=adapter.config.r, target_modules=tuple(targets))
    return replace(config, model=model_keys, optimizer=optimizer, lora=lora)


def _lengths_of_documents(trainer: Any) -> list[int]:
    """The lengths of the trainer's documents, or the longest that its arguments allow; [] for neither."""
    data = trainer.train_dataset
    args = trainer.args
    if "input_ids" in (getattr(data, "column_names", None) or ()) and hasattr(data, "select"):
        rows = data.select(range(min(len(data), MOST_ROWS)))
        if "seq_lengths" in data.column_names:  # of packed rows
            return [int(n) for lengths in rows["seq_lengths"] for n in lengths]
        return [len(ids) for ids in rows["input_ids"]]
    if data is not None and hasattr(data, "__getitem__") and hasattr(data, "__len__") and len(data):
        numbers = np.linspace(0, len(data) - 1, min(len(data), FEW_ROWS)).astype(int).tolist()
        rows = [data[number] for number in numbers]
        if all(isinstance(row, Mapping) and "input_ids" in row for row in rows):
            return [len(row["input_ids"]) for row in rows]
    longest_allowed = getattr(args, "max_length", None)
    if (answer := getattr(args, "max_completion_length", None)) is not None:
        # Prompts without a limit are taken to be as long as answers.
        longest_allowed = answer + (getattr(args, "max_prompt_length", None) or answer)
    return [int(longest_allowed)] if longest_allowed else []


SAVES = "trainer.save_model(folder)"


class LongspanMixin(GenerationPart, PreferencesPart, StepsPart, EvaluationPart, FilesPart):
    """Goes before any Trainer class: `class Mine(LongspanMixin, SFTTrainer)`. To the Trainer all ranks are one process.

    `longspan=` are the LongspanArguments. Raises ConfigError, which names longspan, for arguments that it does not run,
    and ModelError for such models.
    """

    hyperparameter_search = refuse_search
    model_accepts_loss_kwargs: bool

    def __init__(self, *args: Any, longspan: LongspanArguments | None = None, **keywords: Any) -> None:
        self.longspan: LongspanArguments = longspan or LongspanArguments()
        arguments = next((x for x in (*args, *keywords.values()) if isinstance(x, TrainingArguments)), None)
        if arguments is None:
            raise ConfigError(
                f"{type(self).__name__} is made without TrainingArguments, and longspan must give it the batch of all "
                "ranks in them; give args=, such as SFTConfig(output_dir=…), through a constructor of your own too"
            )
        # What can be refused before the world is opened is refused here.
        for reason in refusals_of_arguments(arguments, self.longspan, keywords):
            raise ConfigError(reason)
        model = keywords.get("model", args[0] if args else None)
        if isinstance(model, nn.Module):
            refuse_model_kind(model, self.longspan.config().model.frozen)
        refuse_generation(type(self), arguments, rollout=keywords.get("rollout_func") is not None)
        self._one_process = OneProcess.add_trainer(self.longspan.home)
        self._is_open = True
        try:
            folder = Path(arguments.output_dir or ".")
            run_on_first_rank(self.world, lambda: folder.mkdir(parents=True, exist_ok=True), CheckpointError)
            self._stock_arguments = arguments
            arguments_here = self._one_process.arguments_for_all_ranks(arguments)
            for name in CHECKPOINTING:  # `prepare` recomputes
                if getattr(arguments_here, name, None):
                    setattr(arguments_here, name, False)
            if isinstance(model, str):  # TRL loads it by its name, and must not spread it over all GPUs
                clear_device_map(arguments_here)
            positional = (arguments_here if value is arguments else value for value in args)
            named = {name: arguments_here if value is arguments else value for name, value in keywords.items()}
            self._facade = Facade(lambda: self.model, self._token_values)
            self._prepared_model: Any = None
            with self._replace_generation():
                super().__init__(*positional, **named)
            refuse_made_model(self)
            if is_score_model(unwrap_peft_model(self.model)):
                # transformers' heads ignore the count of targets: the Trainer is to divide by steps of accumulation.
                self.model_accepts_loss_kwargs = False
                self._runs_ahead = False
            self._refuse_reference()
            self._try_to_save_files()
            if is_first_rank(self.world):
                print(layout_line(self.longspan.config(), self.world.home), flush=True)
        except BaseException:
            self._leave_one_process()
            raise

    @property
    def world(self) -> World:
        """The open World of all ranks."""
        return self._one_process.world

    def create_accelerator_and_postprocess(self) -> None:
        """The stock Trainer makes an Accelerator here, of its own class and arguments, which then becomes one of ours.

        TRL loads a reference after this call, so the device map is cleared here. Earlier it may not be: beside a model
        that is given, TRL would warn of `model_init_kwargs`.
        """
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = OneAccelerator
        self.accelerator.before_backward, self.accelerator.after_backward = self._check_loss, self._add_gradients
        self.accelerator.dataloader_config.dispatch_batches = False  # every rank reads a stream, not the first only
        clear_device_map(self.args)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave the model where it is: `prepare` moves what a rank keeps."""

    def _prepare_once(self) -> None:
        """Prepare the model and TRL's reference before the first pass or optimizer; again if the model is replaced."""
        if self._prepared_model is not None and self._prepared_model is self.model:
            return
        inside = unwrap_peft_model(self.model)
        self._facade.head = take_fused_head(inside)
        reference_config = take_reference_adapter(self.model)
        self.memory_plan: MemoryPlan | None
        resolved = resolve_trainer(self)
        self._config = resolved.config
        self._cost = resolved.cost
        self.memory_plan = resolved.memory
        self._prepare_model(self.model, self._facade)
        if reference_config is not None:
            ReferenceAdapter(self.model, self._facade.inner_model, reference_config)
        self.model_wrapped: Facade = self._facade
        self._prepared_model = self.model
        reference = getattr(self, "ref_model", None)
        if isinstance(reference, PreTrainedModel):
            facade = Facade(lambda: reference, self._token_values, take_fused_head(reference))
            self._prepare_model(reference, facade, training=False)
            self.ref_model = facade

    def _prepare_model(self, model: Any, facade: Facade, *, training: bool = True) -> None:
        prepared = longspan.prepare(
            model, self.world, options=options_of_prepare(self, model, self.memory_plan, training=training)
        )
        guard_prepared_model(prepared, architecture_name(prepared), SAVES)
        redirect_peft_model(model, prepared, SAVES)
        _route_calls(prepared, facade)
        if model is not prepared:  # a PeftModel stands around it; DPO calls that with its adapter off
            model.forward = facade.__call__

    def create_optimizer(self, *args: Any) -> Any:
        """Make the Trainer's optimizer, over the parameters of the model, which is prepared first.

        Moments of parameters that wait on the host are there too.
        """
        self._prepare_once()
        made = self.optimizer is None
        self.optimizer: Any = super().create_optimizer(*args)
        if not made:
            return self.optimizer
        name = optimizer_name(self._stock_arguments) if self.optimizer_cls_and_kwargs is None else ""
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        if name == PAGED or any(map(waits_on_host, parameters)):
            self.optimizer = offload_optimizer_states(self.optimizer, self.world)
        if (moments := ONE_PASS_OPTIMIZERS.get(name, "")) and is_first_rank(self.world):
            print(
                f"optimizer  {name} is longspan's AdamW, with moments {moments}, without bitsandbytes", flush=True
            )
        return self.optimizer

    @classmethod
    def get_optimizer_cls_and_kwargs(cls, args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return the class and the arguments for `args.optim`: longspan's AdamW for names of bitsandbytes' AdamW."""
        if optimizer_name(args) not in ONE_PASS_OPTIMIZERS:
            return super().get_optimizer_cls_and_kwargs(args, model)
        betas = (args.adam_beta1, args.adam_beta2)
        kind = OnePassAdamW if optimizer_name(args) == PAGED else EightBitAdamW
        return kind, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}

    def _prepare_for_training(self, *args: Any) -> Any:
        self._prepare_once()
        if self.optimizer is not None:
            refuse_other_parameters(self._facade.inner_model, self._torch_optimizer())
        return super()._prepare_for_training(*args)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        self._prepare_once()
        return self._facade

    def train(self, *args: Any, **keywords: Any) -> Any:
        """Train as the Trainer does; entered by all ranks."""
        with self._report_errors_to_others():
            return super().train(*args, **keywords)

    def evaluate(self, *args: Any, **keywords: Any) -> Any:
        """Evaluate as the Trainer does; entered by all ranks."""
        with self._report_errors_to_others():
            return super().evaluate(*args, **keywords)

    def predict(self, *args: Any, **keywords: Any) -> Any:
        """Predict as the Trainer does; entered by all ranks."""
        with self._report_errors_to_others():
            return super().predict(*args, **keywords)

    @contextmanager
    def _report_errors_to_others(self) -> Iterator[None]:
        """Report an error of this rank alone, as of a metric; all wait at the end, so that none goes on without it."""
        try:
            with errors_in_words_of_scripts():
                yield
            self.world.control.barrier("the end of train, evaluate or predict")
        except BaseException as error:
            if not getattr(error, "on_all_ranks", False):
                self.world.watch.report_leaving(error)
            raise

    def end(self) -> None:
        """End the trackers; the last trainer of ours closes the world and puts accelerate's state back."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self._leave_one_process()

    def _leave_one_process(self) -> None:
        if self._is_open:
            self._is_open = False
            self._one_process.remove_trainer()


def layout_line(config: RunConfig, home: Layout) -> str:
    training = PlannerConfig.training(config).text
    evaluation = PlannerConfig.evaluation(config).text
    degrees = {"tp": home.tp, "ep": home.ep, "dp_replicate": home.dp_replicate}
    also = "".join(f", {name} {degree}" for name, degree in degrees.items() if degree > 1)
    shards = len(home.ranks) // home.dp_replicate
    return (
        f"longspan: {plural(len(home.ranks), 'rank')}, {plural(home.slots, 'slot')}{also}; training {training}, "
        f"evaluation {evaluation}; weights sharded over {plural(shards, 'rank')}"
    )


def _route_calls(prepared: Any, facade: Facade) -> None:
    """Let a call of the prepared model without a shard, as trainers make it, reach the façade."""
    kind = type(prepared)

    def call(model: Any, *args: Any, **batch: Any) -> Any:
        return kind.__call__(model, *args, **batch) if "shard" in batch else facade(*args, **batch)

    def refuse_another(_: Any, *args: Any, **keywords: Any) -> NoReturn:
        raise ModelError(
            f"a second {architecture_name(prepared)} is made by the prepared model's class, as by TRL's BEMACallback: "
            "its weights would be whole, and the model's are parts; keep averages of model.parameters() as they are, "
            "and copy them into these before a save"
        )

    # Python looks `__call__` up in the class, so the model gets a class of its own.
    own = {"__call__": call, "__new__": refuse_another, "__module__": kind.__module__}
    prepared.__class__ = type(kind.__name__, (kind,), own)


class LongspanTrainer(LongspanMixin, Trainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """transformers' Trainer whose ranks share documents by longspan's plans."""


def with_longspan(kind: type[Any]) -> type[Any]:
    """Return a Trainer class whose ranks share documents by longspan's plans.

    >>> trainer = with_longspan(SFTTrainer)(model=model, args=args, longspan=LongspanArguments(context_parallel_size=4))

    `longspan=` of its constructor are the LongspanArguments; everything else is as in the given class. Raises
    ConfigError for what is no Trainer class.
    """
    if not (isinstance(kind, type) and issubclass(kind, Trainer)):
        raise ConfigError(f"with_longspan takes a Trainer class, and got {kind!r}; give the class, not an instance")
    if issubclass(kind, LongspanMixin):
        return kind
    return type(f"Longspan{kind.__name__}", (LongspanMixin, kind), {"__doc__": LongspanMixin.__doc__})
