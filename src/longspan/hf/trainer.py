"""`with_longspan(TrainerClass)`: a Trainer of transformers or TRL whose ranks share documents by longspan's plans."""

import inspect
from typing import Any

from transformers import Trainer, TrainingArguments, set_seed

import longspan
from longspan.hf.arguments import LongspanArguments
from longspan.hf.facade import Facade, take_fused_head
from longspan.hf.files import FilesPart
from longspan.hf.one_process import OneAccelerator, OneProcess
from longspan.hf.steps import StepsPart
from longspan.model.adapters import model_inside


class LongspanMixin(StepsPart, FilesPart):
    """Goes before any Trainer class: `class Mine(LongspanMixin, SFTTrainer)`. To the Trainer all ranks are one process.

    `longspan=` are the LongspanArguments. Raises ConfigError, which names longspan, for arguments that it does not run.
    """

    def __init__(self, *args: Any, longspan: LongspanArguments | None = None, **keywords: Any) -> None:
        self.longspan = longspan or LongspanArguments()
        given = _bind(super().__init__, args, keywords)
        arguments = given.arguments.get("args") or _default_arguments(super().__init__)
        self._one = OneProcess.enter(self.longspan.home)
        try:
            given.arguments["args"] = self._one.arguments(arguments)
            self._facade = Facade(lambda: self.model, self._token_values)
            self._references: dict[str, Facade] = {}
            self._prepared = False
            super().__init__(*given.args, **given.kwargs)
            if hasattr(self, "_buffered_inputs"):  # GRPO and RLOO seed each rank apart, and shuffle with it
                set_seed(self.args.seed)
        except BaseException:
            self._leave()
            raise

    @property
    def world(self) -> Any:
        """The open World of all ranks."""
        return self._one.world

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator that takes the rows of all ranks."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = OneAccelerator

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave the model where it is: `prepare` moves what a rank keeps."""

    # ---- the model

    def _prepare_once(self) -> None:
        """Prepare the model, and a reference model of TRL, before the first pass or optimizer."""
        if self._prepared:
            return
        self._prepared = True
        self._facade.head = take_fused_head(model_inside(self.model))
        self._prepare_model(self.model, self._facade)
        self.model_wrapped = self._facade
        reference = getattr(self, "ref_model", None)
        if reference is not None:
            facade = Facade(lambda: reference, self._token_values, take_fused_head(model_inside(reference)))
            self._prepare_model(reference, facade)
            self.ref_model = facade

    def _prepare_model(self, model: Any, facade: Facade) -> None:
        prepared = longspan.prepare(model, self.world)
        _answer_calls(prepared, facade)
        if model is not prepared:  # a PeftModel stands around it; DPO calls that with its adapter off
            model.forward = facade.__call__

    def _prepare_for_training(self, *args: Any) -> Any:
        self._prepare_once()
        return super()._prepare_for_training(*args)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        self._prepare_once()
        return self._facade

    # ---- the end

    def end(self) -> None:
        """End the trackers; the last trainer of ours closes the world and puts accelerate's state back."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self._leave()

    def _leave(self) -> None:
        one, self._one_left = self._one, True
        one.leave()


def _bind(init: Any, args: Any, keywords: Any) -> inspect.BoundArguments:
    return inspect.signature(init).bind_partial(*args, **keywords)


def _default_arguments(init: Any) -> TrainingArguments:
    return TrainingArguments(output_dir="tmp_trainer")


def _answer_calls(prepared: Any, facade: Facade) -> None:
    """Let a call of the prepared model without a shard, as trainers make it, reach the façade."""
    kind = type(prepared)

    def call(model: Any, *args: Any, **batch: Any) -> Any:
        return kind.__call__(model, *args, **batch) if "shard" in batch else facade(*args, **batch)

    prepared.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


class LongspanTrainer(LongspanMixin, Trainer):
    """transformers' Trainer whose ranks share documents by longspan's plans."""


def with_longspan(kind: type[Any]) -> type[Any]:
    """A Trainer class whose ranks share documents by longspan's plans.

    >>> trainer = with_longspan(SFTTrainer)(model=model, args=args, longspan=LongspanArguments(context_parallel_size=4))

    `longspan=` of its constructor are the LongspanArguments; everything else is as in the given class.
    """
    return type(f"Longspan{kind.__name__}", (LongspanMixin, kind), {"__doc__": LongspanMixin.__doc__})
