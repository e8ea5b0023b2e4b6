"""What a longspan trainer does not run, refused by name at construction: settings, models, losses.

Arguments are read as they stand then: `args.fsdp` set after they were made counts, too.
"""

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel, Trainer
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer_utils import SaveStrategy

from longspan.config.keys import AUTO
from longspan.config.memory_keys import form_of_config
from longspan.errors import ConfigError, ModelError, plural
from longspan.hf.arguments import LongspanArguments
from longspan.hf.references import REFERENCE
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.model.exactness.check_model import refuse_quantized
from longspan.model.frozen.formats.loaded_linears import holds_codes
from longspan.model.kinds import SCORE_HEADS
from longspan.model.marks import refuse_gradient_hooks
from longspan.model.score_heads import find_score_head
from longspan.plan.form import Form

TORCH_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
# Of bitsandbytes, in whose place longspan's AdamW goes, and where or how its moments are.
PAGED = "paged_adamw_32bit"
ONE_PASS_OPTIMIZERS = {
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "in eight bits"),
    PAGED: "in the host's memory",
}
NAMES_TO_READ = "loss, and of a fused head log_probs, entropy, is_top1, mean_logits, log_sum_sq_probs, label_mask"
_PASSES = (
    "a pass has some of a batch's rows, and runs before the loss or without gradients, so that a loss cannot depend on "
    f"tensors inside the model. It may read {NAMES_TO_READ}, and parameters as p.full_tensor()"
)
# The hooks of these libraries keep nothing for a loss.
_LIBRARIES = ("longspan", "torch", "transformers", "peft", "trl", "accelerate")
_HOOKS_BEFORE = WeakKeyDictionary[nn.Module, int]()  # how many hooks had been made when a model had none to refuse
_LAYOUT = "the layout is in longspan's own keys (docs/trainer.md)"
_SETTINGS: dict[str, str] = {
    "deepspeed": f"DeepSpeed would shard and step on its own; leave it out: {_LAYOUT}",
    "fsdp": f"parameters are sharded by longspan already; leave it out: {_LAYOUT}",
    "parallelism_config": f"leave it out: {_LAYOUT}",
    "torch_compile": "a compiled model would be one whose layers attend locally; leave it out",
    "auto_find_batch_size": "ranks would try different sizes; max_tokens_per_slot bounds the rows of a pass",
    "neftune_noise_alpha": "noise would differ with the layout; leave it out",
    "label_smoothing_factor": "the smoothed loss reads all logits; leave it out",
    "use_liger_kernel": "it replaces the forward that longspan runs; leave it out",
    "fp16": "gradients are not scaled; use bf16=True",
    "fp16_full_eval": "the model would be cast between training and evaluation; leave it out",
    "bf16_full_eval": "the model would be cast between training and evaluation; leave it out",
    "entropy_coef": "the gradient of the entropy is not computed; set it to 0",
    "enable_jit_checkpoint": "each rank would save by a timer of its own; use save_steps",
    "precompute_ref_log_probs": "a step runs its reference itself, under the step's plan; leave it out",
    "push_to_hub": "files are pushed by one process; push the saved folder afterwards",
}
# What the configuration of `accelerate launch` asks for, as accelerate reads it.
_LAUNCHER_SETTINGS: dict[str, str] = {
    "ACCELERATE_USE_DEEPSPEED": _SETTINGS["deepspeed"],
    "ACCELERATE_USE_FSDP": _SETTINGS["fsdp"],
    "ACCELERATE_USE_MEGATRON_LM": f"Megatron-LM would shard and step on its own; leave it out: {_LAYOUT}",
    "ACCELERATE_USE_PARALLELISM_CONFIG": _SETTINGS["parallelism_config"],
    "ACCELERATE_DYNAMO_BACKEND": _SETTINGS["torch_compile"],
}


def optimizer_name(args: Any) -> str:
    """Return the name that `args.optim` has."""
    return getattr(args.optim, "value", args.optim)


def refusals_of_arguments(
    args: Any, longspan_arguments: LongspanArguments, constructor_values: Mapping[str, Any]
) -> Iterator[str]:
    """Yield why settings of a trainer's constructor, whose `constructor_values` are by name, are not run."""
    for name, why in _SETTINGS.items():
        if value := getattr(args, name, None):
            yield f"args.{name} is {value!r}, which a longspan trainer does not run: {why}"
    if args.mixed_precision not in ("no", "bf16"):
        yield (
            f"args.mixed_precision is {args.mixed_precision!r}, from the launcher's ACCELERATE_MIXED_PRECISION, which "
            "a longspan trainer does not run; use bf16"
        )
    for name, why in _LAUNCHER_SETTINGS.items():
        if (value := os.environ.get(name, "no")).lower() not in ("", "no", "false", "0"):
            yield (
                f"{name} is {value!r} in the environment, from the configuration of accelerate launch, which "
                f"a longspan trainer does not run: {why}"
            )
    name = optimizer_name(args)
    known_optimizers = (*TORCH_OPTIMIZERS, *ONE_PASS_OPTIMIZERS)
    if name not in known_optimizers and constructor_values.get("optimizer_cls_and_kwargs") is None:
        yield (
            f"args.optim is {name!r}, which a longspan trainer does not run over sharded parameters; use one of "
            f"{', '.join(known_optimizers)}, or optimizer_cls_and_kwargs=(a class, {{…}}), which is "
            "tried first"
        )
    if args.accelerator_config is not None and args.accelerator_config.split_batches:
        yield (
            "accelerator_config.split_batches is true, which a longspan trainer does not run: a micro-batch is "
            "per_device_train_batch_size × processes rows; leave it out"
        )
    if not args.dataloader_in_order and args.dataloader_num_workers > 1:
        yield (
            f"args.dataloader_in_order is False with {args.dataloader_num_workers} workers: batches would come as "
            "workers end, in another order on each rank and after a resume; leave it out"
        )
    if longspan_arguments.pp > 1:
        yield (
            f"pp is {longspan_arguments.pp}: a longspan trainer runs no pipelines, as a Trainer holds one model on "
            "every rank; use tp, ep or dp_replicate, or longspan train"
        )
    if args.save_strategy != SaveStrategy.NO and getattr(args, "save_on_each_node", False):
        yield "args.save_on_each_node is true: a longspan trainer writes one folder that all ranks see; leave it out"


def refuse_model_kind(maybe_wrapped: Any, form: Form) -> None:
    """Raise ModelError or ConfigError for a kind of model that longspan cannot run in a Trainer.

    By the form of the run weights that were loaded in 4 or 8 bits may stay so.
    """
    model: Any = unwrap_peft_model(maybe_wrapped)
    name = type(model).__name__
    takes_codes = form.frozen in (AUTO, "stored") and holds_codes(model)
    devices = {*(getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > (1 if takes_codes else 0):  # transformers quantises on one
        raise ConfigError(
            f"{name} was loaded with a device_map over {plural(len(devices), 'device')}, and a longspan trainer places "
            "parameters itself; load it without device_map"
        )
    if not takes_codes:
        refuse_quantized(model)
    config = getattr(model, "config", None)
    if is_score_model(model):
        return
    causal = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "ForCausalLM") is ForCausalLMLoss
    head: Any = getattr(model, "get_output_embeddings", None)
    if not causal or getattr(config, "is_encoder_decoder", False) or head is None or head() is None:
        raise ModelError(
            f"{name} is no causal language model, which a longspan trainer needs; use an AutoModelForCausalLM"
        )


def is_score_model(model: Any) -> bool:
    """Return whether a model is one of transformers' classifiers over a decoder, prepared or not."""
    scores = any(kind.__name__.endswith(SCORE_HEADS) for kind in type(model).__mro__)
    is_decoder = (
        scores and type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING and not model.config.is_encoder_decoder
    )
    return is_decoder and find_score_head(model) is not None


def refuse_made_model(trainer: Any) -> None:
    """Raise ModelError or ConfigError for models of a trainer that was made, where longspan cannot run them there."""
    refuse_model_kind(trainer.model, form_of_config(trainer.longspan.config()))
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise ConfigError(
            "optimizers= brings an optimizer of parameters that longspan replaces when it shards the model; give its "
            "class and arguments: optimizer_cls_and_kwargs=(torch.optim.AdamW, {…}), or args.optim"
        )
    model = unwrap_peft_model(trainer.model)
    name = type(model).__name__
    config = getattr(model, "config", None)
    if getattr(config, "vision_config", None) is not None and hasattr(trainer.processing_class, "image_processor"):
        raise ModelError(
            f"{name} with {type(trainer.processing_class).__name__} reads images, which a longspan trainer does not; "
            "give its tokenizer as processing_class for text, or use longspan train"
        )
    if getattr(config, "output_router_logits", False) or getattr(trainer, "aux_loss_enabled", False):
        raise ModelError(
            f"output_router_logits of {name} adds the routers' balance loss as transformers computes it, a batch at a "
            "time; a longspan trainer does not: set it to False in the configuration, or for TRL "
            "args.router_aux_loss_coef to 0.0; or use longspan train"
        )
    if (is_score_model(model) or not has_cross_entropy_loss(trainer)) and (dropout := _dropout_text(trainer.model)):
        way = ", or args.disable_dropout to True" if hasattr(trainer.args, "disable_dropout") else ""
        raise ModelError(
            f"{dropout} of {name}, and the loss of {type(trainer).__name__} takes two forward passes, which would drop "
            f"different values; set it to 0{way}"
        )
    adapters = [adapter for adapter in getattr(trainer.model, "peft_config", ()) if adapter != REFERENCE]
    if len(adapters) > 1:
        raise ModelError(
            f"the model has {len(adapters)} adapters ({', '.join(adapters)}), and a longspan trainer runs one, which "
            "it trains; keep one: model.delete_adapter(name)"
        )
    reference = getattr(trainer, "ref_model", None)
    if reference is not None and not isinstance(getattr(reference, "inner_model", reference), PreTrainedModel):
        raise ModelError(
            f"ref_model is {type(reference).__name__}: a longspan trainer prepares models of transformers; merge an "
            "adapter into it first (ref_model.merge_and_unload())"
        )
    if getattr(reference, "hf_device_map", None):
        raise ConfigError(
            "ref_model was loaded with a device_map, and a longspan trainer places parameters itself; load it without "
            "device_map"
        )


def has_cross_entropy_loss(trainer: Any) -> bool:
    """Return whether a trainer's loss is taken for the cross entropy: transformers' own, or TRL's "nll"."""
    # TRL puts a text there before transformers 5.19.
    if callable(trainer.compute_loss_func):
        return False
    owners = (kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
    owner = next(kind for kind in owners if not kind.__module__.startswith("longspan.hf."))
    asks_for_it = owner.__module__.startswith("trl.") and getattr(trainer.args, "loss_type", None) == "nll"
    return owner is Trainer or asks_for_it


def refuse_hooks(model: nn.Module) -> None:
    """Raise ModelError for a hook on a gradient, or a forward hook that is not of longspan or a library under it.

    A model without such hooks is looked at again only once a hook was made, of any module: torch counts them all.
    """
    if _HOOKS_BEFORE.get(model) == RemovableHandle.next_id:
        return
    refuse_gradient_hooks(model)
    for name, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            function: Any = hook.func if isinstance(hook, partial) else hook
            if str(function.__module__).partition(".")[0] not in _LIBRARIES:
                raise ModelError(
                    f"{name or type(module).__name__} has a forward hook, {getattr(function, '__name__', function)} of "
                    f"{function.__module__}: {_PASSES}; remove it. What changes outputs belongs in the module's class"
                )
    _HOOKS_BEFORE[model] = RemovableHandle.next_id


def refuse_inner_loss(model: nn.Module, loss: Tensor | None = None, nodes: range = range(0)) -> None:
    """Raise ModelError for a loss that depends on tensors inside the model, or for modules that keep such tensors.

    With a `loss` only the loss decides: whether its graph has nodes of passes, whose numbers are `nodes`. Without one
    tensors that modules keep with their graph do.
    """
    if loss is not None and not _graph_reaches(loss.grad_fn, nodes):
        return
    kept_tensors = [
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    ]
    if kept_tensors or loss is not None:
        raise ModelError(f"tensors of a pass are kept with their graph, {kept_tensors}: {_PASSES}; keep x.detach()")


def _graph_reaches(node: Any, nodes: range) -> bool:
    """torch numbers nodes as they are made (`_sequence_nr`, of which it has no public form)."""
    todo = [node]
    seen = {None}
    while todo:
        if (node := todo.pop()) in seen:
            continue
        if node._sequence_nr() in nodes:
            return True
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
    return False


def refuse_sharded_loss(value: Tensor | None) -> None:
    """Raise ModelError for a loss, or its gradient, that is a DTensor."""
    if isinstance(value, DTensor):
        raise ModelError(
            "the loss depends on sharded parameters, of which a rank holds a part; take them whole: p.full_tensor()"
        )


def refuse_search(*_: Any, **__: Any) -> NoReturn:
    """Raise ConfigError: a trial would make models anew on ranks that are in the middle of a plan."""
    raise ConfigError(
        "hyperparameter_search is not run by a longspan trainer: start one process group for each trial, such as one "
        "torchrun with its own arguments"
    )


def _dropout_text(model: nn.Module) -> str:
    """The text is "" for a model without dropout."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return f"{name or type(module).__name__} drops {module.p:g} of its inputs"
        if isinstance(share := getattr(module, "attention_dropout", None), float) and share > 0:
            return f"{name} drops {share:g} of its attention weights"
    return ""
