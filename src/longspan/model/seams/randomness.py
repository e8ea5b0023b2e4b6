"""Refusals of random draws that would depend on the layout, with the keys of the configuration that end them.

`meta_pass.py` finds what a model draws; `CallRules` keeps it.
"""

from typing import Any

from torch import nn

from longspan.errors import ModelError
from longspan.model.kinds import score_columns
from longspan.model.marks import adapter_of_prepared_model
from longspan.model.seams.call_rules import call_rules

_SAMPLE = ("exponential_", "multinomial", "gumbel_softmax")  # draw one of several, as some routers choose experts
# keys of dropout in attention, or in heads of other tasks
_NOT_HERE = ("att", "summary", "classifier", "layerdrop")


def refuse_randomness(model: nn.Module, *, training: bool = True) -> None:
    """Raise ModelError if training, or evaluating, this prepared model would draw numbers that depend on the layout."""
    rules = call_rules(model)
    in_evaluation = bool(rules.draws_in_evaluation)
    if draws := ", ".join(rules.random_draws if training else rules.draws_in_evaluation):
        when = " and in evaluation" if in_evaluation else ""
        remedy = _remedy_text(model, draws, in_evaluation=in_evaluation)
        allowed_text = "" if in_evaluation else ", and evaluation draws nothing"
        raise ModelError(
            f"{rules.architecture} draws at random outside attention in training{when}: {draws}. Each rank would draw "
            f"for its own rows, so that the loss would depend on the layout; {remedy}. Attention "
            f"dropout may stay{allowed_text}"
        )


def _remedy_text(model: nn.Module, draws: str, *, in_evaluation: bool) -> str:
    config = getattr(model, "config", None)
    values = {} if config is None else config.get_text_config().to_dict()
    words = ("drop", "jitter", "noise")
    names = [key for key in values if any(w in key for w in words) and not any(w in key for w in _NOT_HERE)]
    # Every key of "layerdrop", last, even one that names attention, since whole layers are left out by it.
    names += [key for key in values if "layerdrop" in key and key not in names]
    keys = ", ".join(f"{key} ({values[key]:g})" for key in names if _is_positive(values[key]))
    if keys and not any(f"{function} " in draws for function in _SAMPLE):
        return f"before the model is built, set {keys} to 0.0 in its configuration (config.json)"
    if score_columns(model):  # transformers' 0.1 of a token classifier
        return "before the model is built, set classifier_dropout to 0.0 in its configuration (config.json)"
    allowed_text = "" if in_evaluation else ": it can be evaluated alone"
    return f"it does so by its code, and no key of its configuration is known to end that{allowed_text}"


def refuse_two_pass_dropout(model: nn.Module, losses: str) -> None:
    """Raise ModelError if training drops attention weights, or inputs of an adapter.

    `losses` names, in words, the losses that need two forward passes with equal results.
    """
    config = getattr(model, "config", None)
    adapter = adapter_of_prepared_model(model)
    values = {} if config is None else config.get_text_config().to_dict()
    if adapter is not None:
        values["lora_dropout"] = adapter.dropout
    drops = {key: x for key, x in values.items() if key == "lora_dropout" or ("att" in key and "drop" in key)}
    if keys := [f"{key} ({rate:g})" for key, rate in drops.items() if _is_positive(rate)]:
        raise ModelError(
            f"{losses}: their loss takes two forward passes, which dropout would make differ; set {', '.join(keys)} to "
            "0.0 in the configuration before the model is built, or plan so that one micro-batch in lockstep holds "
            "all documents of a set"
        )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
