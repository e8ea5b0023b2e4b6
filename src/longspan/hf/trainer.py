"""`with_longspan(TrainerClass)`: a Trainer of transformers or TRL whose ranks share documents by longspan's plans."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

import longspan
from longspan.comm import World
from longspan.comm.all_ranks import is_first_rank, run_on_first_rank
from longspan.config.sections import RunConfig
from longspan.errors import CheckpointError, ConfigError, plural
from longspan.hf.arguments import LongspanArguments, words_of_scripts
from longspan.hf.evaluation import EvaluationPart
from longspan.hf.facade import Facade, take_fused_head
from longspan.hf.files import FilesPart
from longspan.hf.generation import GenerationPart, refuse_generation
from longspan.hf.memory import CHECKPOINTING, choose_memory, prepare_options
from longspan.hf.one_process import OneAccelerator, OneProcess
from longspan.hf.preferences import PreferencesPart, ReferenceAdapter, clear_device_map, take_reference_adapter
from longspan.hf.refusals import refuse_arguments, refuse_kind, refuse_model, refuse_search
from longspan.hf.steps import StepsPart
from longspan.layout import Layout
from longspan.model.adapters import unwrap_model
from longspan.model.lora.without_adapter import redirect_peft_model
from longspan.model.seams.refusals import guard_model, stock_class_name
from longspan.plan import MemoryPlan
from longspan.train import PlanChoice

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class GivenArguments:
    """What a trainer of the class `kind` is made with; `init` is the constructor to call, without `self`.

    `values` are the arguments by name. Those that `init` takes as *args or **kwargs have the names that the stock
    constructor gives them: that of the first base which has a parameter `args`, the TrainingArguments.
    `parameter_names` are those of both constructors. Raises TypeError for arguments that `init` does not take.
    """

    def __init__(self, kind: type[Any], init: Any, args: Any, keywords: Any) -> None:
        """Bind the arguments to the names of `init`, and its *args and **kwargs to those of the stock constructor."""
        self._bound = inspect.signature(init).bind_partial(*args, **keywords)
        self._names, self._var_positional, self._var_keyword = _parameter_names(self._bound.signature)
        self._stock = next(base for base in kind.__mro__[1:] if "args" in _parameter_names(_signature(base))[0])
        stock = _signature(self._stock)
        self.parameter_names: set[str] = {*self._names, *stock.parameters}
        self.values = {name: value for name, value in self._bound.arguments.items() if name in self._names}
        with suppress(TypeError):  # *args of a class between `kind` and `_stock`: they stand for other parameters
            passed_values = self._argument_value(self._var_positional, ())
            passed_keywords = self._argument_value(self._var_keyword, {})
            stock_call = stock.bind_partial(None, *passed_values, **passed_keywords)  # None: for self
            self.values |= {name: value for name, value in stock_call.arguments.items() if name != "self"}

    @property
    def args(self) -> TrainingArguments:
        """The TrainingArguments, or those that the stock class makes for itself."""
        # Positional arguments have no name in `values` where they stand for other parameters (see the constructor).
        values = (self.values.get("args"), *self._argument_value(self._var_positional, ()))
        return next((v for v in values if isinstance(v, TrainingArguments)), None) or self._default_arguments()

    def call_with(self, arguments: TrainingArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the call, with the caller's TrainingArguments replaced.

        The new ones go to the parameter `args`, else to the caller's place among *args, else to **kwargs. Raises
        ConfigError for a constructor without any of these.
        """
        positional, bound = self._argument_value(self._var_positional, ()), self._bound.arguments
        if "args" in self._names:
            bound["args"] = arguments
        elif any(isinstance(value, TrainingArguments) for value in positional):
            bound[self._var_positional] = tuple(
                arguments if isinstance(value, TrainingArguments) else value for value in positional
            )
        elif self._var_keyword:
            bound[self._var_keyword] = self._argument_value(self._var_keyword, {}) | {"args": arguments}
        else:
            raise ConfigError(
                f"the constructor takes {', '.join(self._names) or 'nothing'}, and longspan must give it args: the "
                "batch of all ranks is in them; let it take args or **kwargs, and pass them on"
            )
        return self._bound.args, self._bound.kwargs

    def _argument_value(self, name: str, default: Any) -> Any:
        return self._bound.arguments.get(name, default)

    def _default_arguments(self) -> TrainingArguments:
        """TRL's trainers have arguments of a class of their own (SFTConfig), and name the folder by model and class."""
        hints = _signature(self._stock).parameters["args"].annotation
        classes = _argument_classes(hints, self._stock)
        config = next((kind for kind in classes if kind is not TrainingArguments), TrainingArguments)
        if config is TrainingArguments:
            return TrainingArguments(output_dir="tmp_trainer")  # transformers' own default
        model = self.values.get("model")
        name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
        return config(f"{str(name).rstrip('/').split('/')[-1]}-{config.__name__.removesuffix('Config')}")


def _signature(kind: type[Any]) -> inspect.Signature:
    return inspect.signature(kind.__init__)


def _parameter_names(signature: inspect.Signature) -> tuple[list[str], str, str]:
    parameters = signature.parameters.values()
    variadic_names = {parameter.kind: parameter.name for parameter in parameters if parameter.kind in _VARIADIC}
    names = [parameter.name for parameter in parameters if parameter.kind not in _VARIADIC]
    return names, variadic_names.get(_VARIADIC[0], ""), variadic_names.get(_VARIADIC[1], "")


def _argument_classes(annotation: Any, owner: type[Any]) -> list[type[Any]]:
    """Return the argument classes that an annotation names; a string is evaluated in the module of its `owner`."""
    if isinstance(annotation, str):
        annotation = eval(annotation, vars(inspect.getmodule(owner)))
    return [
        argument_class
        for argument_class in getattr(annotation, "__args__", (annotation,))
        if isinstance(argument_class, type) and issubclass(argument_class, TrainingArguments)
    ]


SAVES = "trainer.save_model(folder)"


class LongspanMixin(GenerationPart, PreferencesPart, StepsPart, EvaluationPart, FilesPart):
    """Goes before any Trainer class: `class Mine(LongspanMixin, SFTTrainer)`. To the Trainer all ranks are one process.

    `longspan=` are the LongspanArguments. Raises ConfigError, which names longspan, for arguments that it does not run,
    and ModelError for such models.
    """

    hyperparameter_search = refuse_search

    def __init__(self, *args: Any, longspan: LongspanArguments | None = None, **keywords: Any) -> None:
        self.longspan: LongspanArguments = longspan or LongspanArguments()
        construction = GivenArguments(type(self), super().__init__, args, keywords)
        arguments, model = construction.args, construction.values.get("model")
        # What can be refused before the world is opened is refused here.
        refuse_arguments(arguments, self.longspan, construction.values)
        if isinstance(model, nn.Module):
            refuse_kind(model)
        refuse_generation(type(self), arguments, construction.values, construction.parameter_names)
        self._one_process = OneProcess.add_trainer(self.longspan.home)
        self._is_open = True
        try:
            folder = Path(arguments.output_dir or ".")
            run_on_first_rank(self.world, lambda: folder.mkdir(parents=True, exist_ok=True), CheckpointError)
            self._stock_arguments = arguments
            arguments_here = _turn_off_checkpointing(self._one_process.arguments_for_all_ranks(arguments))
            if isinstance(model, str):  # TRL loads it by its name, and must not spread it over all GPUs
                clear_device_map(arguments_here)
            positional, keyword_arguments = construction.call_with(arguments_here)
            self._facade = Facade(lambda: self.model, self._token_values)
            self._prepared_model: Any = None
            with self._replace_generation():
                super().__init__(*positional, **keyword_arguments)
            refuse_model(self)
            self._refuse_reference()
            self._try_saving()
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
        """Make the accelerator that takes the rows of all ranks."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = OneAccelerator
        self.accelerator.dataloader_config.dispatch_batches = False  # every rank reads a stream, not the first only
        clear_device_map(self.args)  # from here on TRL loads references

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave the model where it is: `prepare` moves what a rank keeps."""

    # ---- the model

    def _prepare_once(self) -> None:
        """Prepare the model, and a reference model of TRL, before the first pass or optimizer; again if it is replaced.

        First what TRL put on a model is taken off: a fused head, or a copy of the adapter.
        """
        if self._prepared_model is not None and self._prepared_model is self.model:
            return
        inside = unwrap_model(self.model)
        self._facade.head = take_fused_head(inside)
        reference_config = take_reference_adapter(self.model)
        self.memory_plan: MemoryPlan | None
        self._config, self.memory_plan = choose_memory(self)
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
            model, self.world, options=prepare_options(self, model, self.memory_plan, training=training)
        )
        guard_model(prepared, stock_class_name(prepared), SAVES)
        redirect_peft_model(model, prepared, SAVES)
        _route_calls(prepared, facade)
        if model is not prepared:  # a PeftModel stands around it; DPO calls that with its adapter off
            model.forward = facade.__call__

    def _prepare_for_training(self, *args: Any) -> Any:
        self._prepare_once()
        return super()._prepare_for_training(*args)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        self._prepare_once()
        return self._facade

    # ---- what fails on one rank ends all

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
        """Report an error that only this rank raises inside, as of a collator or a metric, to the ranks that wait.

        All ranks wait for each other at the end, so that none goes on without a rank whose metric failed.
        """
        try:
            with words_of_scripts():
                yield
            self.world.control.barrier("the end of train, evaluate or predict")
        except BaseException as error:
            if not getattr(error, "on_all_ranks", False):
                self.world.watch.leave(error)
            raise

    # ---- the end

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
    """Write how ranks will share documents, in a line for the console."""
    training, evaluation = PlanChoice.training(config).text, PlanChoice.evaluation(config).text
    degrees = {"tp": home.tp, "ep": home.ep, "dp_replicate": home.dp_replicate}
    also = "".join(f", {name} {degree}" for name, degree in degrees.items() if degree > 1)
    shards = len(home.ranks) // home.dp_replicate
    return (
        f"longspan: {plural(len(home.ranks), 'rank')}, {plural(home.slots, 'slot')}{also}; training {training}, "
        f"evaluation {evaluation}; weights sharded over {plural(shards, 'rank')}"
    )


def _turn_off_checkpointing(args: TrainingArguments) -> TrainingArguments:
    for name in CHECKPOINTING:
        if getattr(args, name, None):
            setattr(args, name, False)
    return args


def _route_calls(prepared: Any, facade: Facade) -> None:
    """Let a call of the prepared model without a shard, as trainers make it, reach the façade."""
    kind = type(prepared)

    def call(model: Any, *args: Any, **batch: Any) -> Any:
        return kind.__call__(model, *args, **batch) if "shard" in batch else facade(*args, **batch)

    # Python looks `__call__` up in the class, so the model gets a class of its own.
    prepared.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


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
