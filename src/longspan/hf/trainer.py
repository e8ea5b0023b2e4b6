"""`with_longspan(TrainerClass)`: a Trainer of transformers or TRL whose ranks share documents by longspan's plans."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

import longspan
from longspan.comm import World
from longspan.comm.all_ranks import is_first_rank, run_on_first_rank
from longspan.config.memory_keys import form_of_config
from longspan.config.sections import RunConfig
from longspan.errors import CheckpointError, ConfigError, ModelError, plural
from longspan.hf.arguments import LongspanArguments, reword_errors_for_scripts
from longspan.hf.distillation import DistillationPart, refuse_distillation
from longspan.hf.evaluation import EvaluationPart
from longspan.hf.facade import Facade, take_fused_head
from longspan.hf.files import FilesPart
from longspan.hf.generation import GenerationPart, refuse_generation
from longspan.hf.one_process import OneAccelerator, OneProcess
from longspan.hf.references import ReferenceAdapter, clear_device_map, remove_reference_adapter
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
from longspan.hf.resolve_trainer import CHECKPOINTING, options_of_prepare, resolve_trainer
from longspan.layout import Layout
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.model.adapters.disable_adapter import redirect_peft_model
from longspan.model.layers import architecture_name
from longspan.model.marks import refuse_other_parameters, waits_on_host
from longspan.model.seams.guards import guard_prepared_model
from longspan.plan import MemoryPlan
from longspan.train import PlannerConfig, offload_optimizer_states
from longspan.train.optim.eight_bit_adamw import EightBitAdamW
from longspan.train.optim.one_pass_adamw import OnePassAdamW

SAVES = "trainer.save_model(folder)"


class LongspanMixin(GenerationPart, DistillationPart, EvaluationPart, FilesPart):
    """Goes before any Trainer class: `class Mine(LongspanMixin, SFTTrainer)`. To the Trainer all ranks are one process.

    `longspan=` are the LongspanArguments. Raises ConfigError, which names longspan, for arguments that it does not run,
    and ModelError for such models.
    """

    hyperparameter_search = refuse_search
    model_accepts_loss_kwargs: bool

    def __init__(self, *args: Any, longspan: LongspanArguments | None = None, **keywords: Any) -> None:
        """Refuse what can be refused, join the world of all ranks, and make the Trainer with arguments for all of them.

        All ranks make it together. The model is prepared later, before its first pass; an error leaves the world again.
        """
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
            refuse_model_kind(model, form_of_config(self.longspan.config()))
        refuse_distillation(type(self), arguments)
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
        self.accelerator.before_backward = self._check_loss
        self.accelerator.after_backward = self._add_gradients
        self.accelerator.dataloader_config.dispatch_batches = False  # every rank reads a stream, not the first only
        clear_device_map(self.args)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave the model where it is: `prepare` moves what a rank keeps."""

    def _prepare_once(self) -> None:
        """Entered by all ranks, before the first pass or optimizer; again if the model is replaced."""
        if self._prepared_model is not None and self._prepared_model is self.model:
            return
        inside = unwrap_peft_model(self.model)
        self._facade.head = take_fused_head(inside)
        reference_config = remove_reference_adapter(self.model)
        resolved = resolve_trainer(self)
        self._config = resolved.config
        self._cost = resolved.cost
        self.memory_plan: MemoryPlan | None = resolved.memory
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
        self._prepare_teacher()

    def _prepare_model(self, model: Any, facade: Facade, *, training: bool = True) -> None:
        """Without `training` it is a reference, which takes no step."""
        prepared: Any = longspan.prepare(
            model, self.world, options=options_of_prepare(self, model, self.memory_plan, training=training)
        )
        guard_prepared_model(prepared, architecture_name(prepared), SAVES)
        redirect_peft_model(model, prepared, SAVES)
        kind = type(prepared)

        def call_facade(model: Any, *args: Any, **batch: Any) -> Any:
            """Let a call without a shard, as trainers make it, reach the façade."""
            if "shard" in batch:
                return kind.__call__(model, *args, **batch)
            return facade(*args, **batch)

        def refuse_second_model(_: Any, *args: Any, **keywords: Any) -> NoReturn:
            """Raise ModelError: another model of the prepared class would have whole weights where this has parts."""
            raise ModelError(
                f"a second {architecture_name(prepared)} is made by the prepared model's class, as by TRL's "
                "BEMACallback: its weights would be whole, and the model's are parts; keep averages of "
                "model.parameters() as they are, and copy them into these before a save"
            )

        # Python looks `__call__` up in the class, so the model gets a class of its own.
        attributes = {"__call__": call_facade, "__new__": refuse_second_model, "__module__": kind.__module__}
        prepared.__class__ = type(kind.__name__, (kind,), attributes)
        if model is not prepared:  # a PeftModel stands around it; DPO calls that with its adapter off
            model.forward = facade.__call__

    def create_optimizer(self, *args: Any) -> Any:
        """Make the Trainer's optimizer, over the parameters of the model, which is prepared first.

        Moments of parameters that wait on the host are there too.
        """
        self._prepare_once()
        is_new = self.optimizer is None
        self.optimizer: Any = super().create_optimizer(*args)
        if not is_new:
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
        """All wait at the end, so that none goes on without the rank that fails."""
        try:
            with reword_errors_for_scripts():
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
    """Return the line of the first rank that says how ranks share documents and weights."""
    training = PlannerConfig.training(config).text
    evaluation = PlannerConfig.evaluation(config).text
    degrees = {"tp": home.tp, "ep": home.ep, "dp_replicate": home.dp_replicate}
    also = "".join(f", {name} {degree}" for name, degree in degrees.items() if degree > 1)
    shards = len(home.ranks) // home.dp_replicate
    return (
        f"longspan: {plural(len(home.ranks), 'rank')}, {plural(home.slots, 'slot')}{also}; training {training}, "
        f"evaluation {evaluation}; weights sharded over {plural(shards, 'rank')}"
    )


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
