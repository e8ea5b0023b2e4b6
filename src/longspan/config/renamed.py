"""Other names of keys: those of version 0.3, for errors, `longspan upgrade`, the folders of older runs and their docs;
and those of other libraries, for errors (docs/migration.md has them in its tables).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from longspan.config.preference_losses import LOSSES
from longspan.errors import ConfigError

OLD_SETS = "eval"  # tables [[eval]], now [[evaluation.sets]]
SETS = "evaluation.sets"

RENAMED = {
    "data.columns": "data.rename_columns",
    "data.on_bad": "data.on_bad_row",
    "data.cache": "data.cache_dir",
    "data.turns": "data.split_turns",
    "data.end_of_chat": "data.end_of_chat_token",
    "data.eval_documents": "evaluation.documents",
    "context.eval_planner": "evaluation.planner",
    "context.eval_context_parallel_size": "evaluation.context_parallel_size",
    "context.eval_min_dynamic_context_parallel_size": "evaluation.min_dynamic_context_parallel_size",
    "context.eval_max_dynamic_context_parallel_size": "evaluation.max_dynamic_context_parallel_size",
    "context.eval_max_tokens_per_slot": "evaluation.max_tokens_per_slot",
    "context.eval_cp_comm_type": "evaluation.cp_comm_type",
    "context.eval_hierarchical_context_parallel_sizes": "evaluation.hierarchical_context_parallel_sizes",
    "train.lr": "optimizer.lr",
    "train.warmup_steps": "optimizer.warmup_steps",
    "train.schedule": "optimizer.lr_schedule",
    "train.decay_steps": "optimizer.decay_steps",
    "train.min_lr_ratio": "optimizer.min_lr_ratio",
    "train.optimizer": "optimizer.class",
    "train.optimizer_arguments": "optimizer.arguments",
    "train.stochastic_rounding": "optimizer.stochastic_rounding",
    "train.weight_decay": "optimizer.weight_decay",
    "train.max_grad_norm": "optimizer.max_grad_norm",
    "train.memory": "train.plan_memory",
    "train.mlp_tile_rows": "train.mlp_tile_tokens",
    "train.memory_bytes": "train.device_memory_limit",
    "train.offload_states": "train.offload_optimizer_states",
    "train.compiled": "train.compile",
    "train.router_balance_loss": "train.router_aux_loss_coef",
    "train.router_z_loss": "train.router_z_loss_coef",
    "train.eval_every": "evaluation.every",
    "train.eval_metrics": "evaluation.metrics",
    "train.save_every": "checkpoint.every",
    "train.save_minutes": "checkpoint.minutes",
    "train.save_async": "checkpoint.async_mode",
    "train.keep_best": "checkpoint.keep_best",
    "lora.targets": "lora.target_modules",
    "mtp.depths": "mtp.num_layers",
    "mtp.loss_weight": "mtp.loss_scaling_factor",
    "encoder.max_rows": "encoder.max_tokens",
    "encoder.train": "encoder.trainable",
    "encoder.recompute": "encoder.activation_checkpointing",
    "run.resume": "checkpoint.resume",
    "run.keep_checkpoints": "checkpoint.save_total_limit",
    "run.checkpoints": "checkpoint.dir",
    "run.stopped_status": "checkpoint.preempted_exit_code",
    "run.save_on": "checkpoint.save_signals",
}
# Keys that are gone, some after they had been renamed, and what to write instead: in `REPLACING`, or nothing.
GONE = {
    "train.offload_activations": 'train.activation_checkpointing = "full+host" or "selective+host"',
    "train.fused_norms": "nothing: norms are fused on GPUs; in Python prepare(fused_norms=)",
    "train.betas": 'optimizer.arguments = ["betas=[0.9, 0.95]"], the default of adamw',
    "model.rope_factor": 'the factor behind the word: model.rope_scaling = "yarn:4"',
    "train.center_rewards_coefficient": 'train.loss_arguments = ["center_rewards_coefficient=0.01"]',
    "optimizer.decay_steps": 'the steps behind the word: optimizer.lr_schedule = "wsd:200"',
    "encoder.activation_checkpointing": "encoder.max_tokens, with which images are encoded again",
    "data.cache_dir": "nothing: tokens are kept in longspan/corpora of the user's cache (XDG_CACHE_HOME)",
    "evaluation.min_dynamic_context_parallel_size": "nothing: the smallest degree is that of [context]",
    # of tables, under which plans change no figure
    f"{OLD_SETS}.planner": "nothing, or context_parallel_size; evaluation.planner is that of all sets without it",
    f"{OLD_SETS}.min_dynamic_context_parallel_size": "nothing: the smallest degree is that of [context]",
    f"{OLD_SETS}.max_dynamic_context_parallel_size": "evaluation.max_dynamic_context_parallel_size, for all sets",
    f"{OLD_SETS}.hierarchical_context_parallel_sizes": "nothing: evaluation's sizes are fitted to the set's degree",
    f"{OLD_SETS}.max_tokens_per_slot": "evaluation.max_tokens_per_slot, for all sets",
    f"{OLD_SETS}.cp_comm_type": "evaluation.cp_comm_type, for all sets; auto has the fastest of each",
    f"{OLD_SETS}.metrics": "evaluation.metrics, for all sets",
}
REPLACING = (
    "model.rope_scaling",
    "train.activation_checkpointing",
    "train.loss_arguments",
    "optimizer.arguments",
    "optimizer.lr_schedule",
    "encoder.max_tokens",
    "evaluation.max_tokens_per_slot",
    "evaluation.cp_comm_type",
    "evaluation.metrics",
)
ALL_IMAGES = 1 << 30  # as encoder.max_tokens: more tokens than the images of a step have
# By key of now: the values of 0.3 that are other ones now.
VALUES: dict[str, dict[str, Any]] = {
    "data.split_turns": {"together": False, "split": True},
    "train.plan_memory": {"auto": True, "none": False},
    "train.float8": {"rows": "rowwise"},
}


def renamed_value(key: str, value: Any) -> Any:
    """Return what a `value` of 0.3 is called now, for a key by its name of now; other values as they are.

    >>> renamed_value("train.float8", "rows")
    'rowwise'
    """
    return VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value


def renamed_hint(old: str, value: Any = None, *, flag: bool = False) -> str:
    """Say what a key of 0.3 is now, with its `value` where that has another word now; "" for other keys.

    With `flag` it is written as a flag of a command.

    >>> renamed_hint("train.memory", "none"), renamed_hint("train.memory", "none", flag=True)
    ('it is train.plan_memory = false now', 'it is --train.plan_memory false now')
    """
    if old.startswith("eval_"):  # without its section
        old = next((key for key in RENAMED if key.endswith(f".{old}")), old)
    new = RENAMED.get(old, old)
    if new in GONE:
        advice = GONE[new]
        if flag:  # `train.loss = ["a=1"]` → `--train.loss "a=1"`
            advice = re.sub(r'\[("[^"]*")\]', r"\1", advice)
            advice = re.sub(rf"\b({'|'.join(map(re.escape, REPLACING))})( =)?", r"--\1", advice)
        return f"it is gone; write {advice}"
    if new == old:
        return ""
    before, equals = ("--", " ") if flag else ("", " = ")
    text = f"it is {before}{new}"
    if isinstance(value, str) and (word := renamed_value(new, value)) != value:
        text += f"{equals}{word if flag and isinstance(word, str) else json.dumps(word)}"
    return f"{text} now"


def upgraded_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a configuration with keys of 0.3 by their names of now; all other keys stay as they are.

    Gone keys are left out, with what stands for them in other keys, and so is a section from which all has moved.
    Raises ConfigError for a value that should be a list and is none.

    >>> upgraded_tables({"train": {"memory": "none", "lr": 0.1}, "eval": [{"name": "books"}]})
    {'train': {'plan_memory': False}, 'optimizer': {'lr': 0.1}, 'evaluation': {'sets': [{'name': 'books'}]}}
    """
    upgraded = dict[str, Any]()
    gone = dict[str, Any]()
    for section, values in tables.items():
        if section == OLD_SETS:
            upgraded.setdefault("evaluation", {})["sets"] = values
        elif not isinstance(values, Mapping):
            upgraded[section] = values
        else:
            for key, value in values.items():
                new = RENAMED.get(f"{section}.{key}", f"{section}.{key}")
                new_section, _, new_key = new.partition(".")
                if new in GONE:
                    gone[new] = value
                else:
                    upgraded.setdefault(new_section, {})[new_key] = renamed_value(new, value)
    if not all(isinstance(table, Mapping) for table in upgraded.values()):
        return upgraded  # what reads it refuses a section that is no table
    # last, what stands for gone keys, which depends on keys that are there
    sets = upgraded.get("evaluation", {}).get("sets")
    has_sets = _are_tables(sets) and sets
    for key, value in (
        *_values_of_gone_keys(gone, upgraded),
        *(_values_of_sets(sets, upgraded) if has_sets else ()),
    ):
        section, _, name = key.partition(".")
        upgraded.setdefault(section, {})[name] = value
    if has_sets:
        upgraded["evaluation"]["sets"] = [
            {key: value for key, value in table.items() if f"{OLD_SETS}.{key}" not in GONE} for table in sets
        ]
    return upgraded


def _values_of_gone_keys(gone: Mapping[str, Any], tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys of `REPLACING` with their new values in `tables`, which stand for those of `gone` keys.

    A gone key that had its default yields nothing.
    """

    def current_value(key: str, default: Any) -> Any:
        section, _, name = key.partition(".")
        return tables.get(section, {}).get(name, default)

    if (factor := gone.get("model.rope_factor")) and (word := current_value("model.rope_scaling", "")):
        yield "model.rope_scaling", f"{word}:{str(factor).removesuffix('.0')}"  # yarn:4, as files and docs write it
    checkpointing = current_value("train.activation_checkpointing", "auto")
    if gone.get("train.offload_activations") and checkpointing not in ("auto", "none", False):
        yield "train.activation_checkpointing", ("full" if checkpointing is True else checkpointing) + "+host"
    if coefficient := gone.get("train.center_rewards_coefficient"):
        arguments = _require_list("train.loss_arguments", current_value("train.loss_arguments", ()))
        yield "train.loss_arguments", [*arguments, f"center_rewards_coefficient={coefficient}"]
    betas = _require_list("train.betas", gone.get("train.betas", [0.9, 0.95]))
    if [*betas] != [0.9, 0.95]:
        arguments = _require_list("optimizer.arguments", current_value("optimizer.arguments", ()))
        yield "optimizer.arguments", [*arguments, f"betas={json.dumps(betas)}"]
    if steps := gone.get("optimizer.decay_steps"):
        yield "optimizer.lr_schedule", f"wsd:{steps}"
    if gone.get("encoder.activation_checkpointing") and not current_value("encoder.max_tokens", 0):
        yield "encoder.max_tokens", ALL_IMAGES


def _values_of_sets(sets: Sequence[Mapping[str, Any]], tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of [evaluation] that must change, as its sets cannot set them any more, with their values.

    So no set lacks a metric or rows for its documents; where sets had other communication types, it is "auto".
    """
    evaluation = tables["evaluation"]
    # [evaluation] has the values of training where it gives none
    plan = {**tables.get("context", {}), **evaluation}
    lists = [_require_list("metrics", table.get("metrics", ())) for table in (evaluation, *sets)]
    metrics = dict.fromkeys(chain.from_iterable(lists))
    if [*metrics] != [*evaluation.get("metrics", ())]:
        yield "evaluation.metrics", [*metrics]
    rows = plan.get("max_tokens_per_slot")
    own_rows = [table.get("max_tokens_per_slot") for table in sets]
    most = max((number for number in own_rows if isinstance(number, int)), default=0)
    if isinstance(rows, int) and 0 < rows < most:
        yield "evaluation.max_tokens_per_slot", most
    kind = plan.get("cp_comm_type")
    if kind is not None and any(table.get("cp_comm_type", kind) != kind for table in sets):
        yield "evaluation.cp_comm_type", "auto"


def _require_list(key: str, value: Any) -> Sequence[Any]:
    """Return a value that is a list. Raises ConfigError, with its key, for another one."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{key} is {value!r}; give a list, and then upgrade the file")
    return value


def _are_tables(values: Any) -> bool:
    """Return whether a value of TOML is an array of tables."""
    return isinstance(values, list) and all(isinstance(table, Mapping) for table in values)


def gone_keys_of_sets(tables: Mapping[str, Any]) -> list[str]:
    """List the keys that are gone of a configuration's tables of evaluation sets, each once, by their names in `GONE`.

    Tables of 0.3, [[eval]], are read as well as [[evaluation.sets]]; values in `tables` are not checked yet.
    """
    evaluation = tables.get("evaluation")
    new_sets = evaluation.get("sets") if isinstance(evaluation, Mapping) else None
    arrays: list[Any] = [tables.get(OLD_SETS), new_sets]
    names = dict[str, None]()  # in the order of the file
    for sets in filter(_are_tables, arrays):
        for table in sets:
            names |= {f"{OLD_SETS}.{key}": None for key in table}
    return [name for name in names if name in GONE]


# ---- names of other libraries


# A key and what is behind it, or why none is needed; and the names of others, without dashes. A section stands before
# names that say nothing without it.
NAMES = {
    "context.planner dynamic": "dynamic_context_parallel hybrid_context_parallel",
    "context.planner (dynamic for default_dynamic_cp, fixed for dp_balanced)": "sequence_packing_scheduler",
    "context.max_tokens_per_slot": "max_seqlen_per_dp_cp_rank",
    "context.context_parallel_size": "cp_size parallelism_config_cp_size context_parallel_degree "
    "sequence_parallel_size sequence_parallel_degree",
    "context.context_parallel_size (with context.cp_comm_type a2a)": "sp_size parallelism_config_sp_size",
    "context.context_parallel_size (or context.planner dynamic)": "context_parallel.size",
    "context.cp_comm_type": "cp_comm_strategy parallelism_config_cp_comm_strategy context_parallel_rotate_method "
    "context_parallel.backend",
    "context.partition (zigzag is the default)": "context_parallel_load_balancer",
    "parallel.tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel_degree tp_size",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel_degree",
    "parallel.pipeline_schedule": "pipeline_parallel_schedule",
    "parallel.sequence_parallel": "enable_sequence_parallel",
    "parallel.reshard_after_forward": "fsdp_reshard_after_forward",
    "parallel.vpp": "virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank",
    "parallel.ep": "expert_model_parallel_size expert_parallel_size expert_parallel_degree",
    "parallel.dp_replicate": "num_distributed_optimizer_instances data_parallel_replicate_degree dp_replicate_size",
    "train.steps": "train_iters max_steps",
    "train.epochs": "num_train_epochs num_epochs",
    "train.tokens_per_step (in tokens)": "global_batch_size micro_batch_size local_batch_size "
    "per_device_train_batch_size gradient_accumulation_steps",
    "optimizer.lr": "learning_rate",
    "optimizer.lr_schedule": "lr_decay_style lr_scheduler lr_scheduler_type",
    "optimizer.warmup_steps": "lr_warmup_iters",
    "optimizer.arguments (betas=[0.9, 0.95])": "adam_beta1 adam_beta2 betas",
    "optimizer.max_grad_norm": "clip_grad",
    "train.activation_checkpointing": "recompute_granularity gradient_checkpointing activation_checkpoint.mode",
    "train.compile": "compile.enable",
    f"train.loss ({', '.join(LOSSES)})": "loss_type rl stage pref_loss",
    "train.loss_arguments (beta=0.1)": "beta rl_beta pref_beta",
    "train.loss_arguments (simpo_gamma=0.5)": "simpo_gamma",
    "train.loss_arguments (cpo_alpha=0)": "cpo_alpha",
    "train.loss_arguments (desirable_weight=1)": "desirable_weight kto_desirable_weight kto_chosen_weight",
    "train.loss_arguments (undesirable_weight=1)": "undesirable_weight kto_undesirable_weight kto_rejected_weight",
    "train.loss_arguments (label_smoothing=0.1)": "label_smoothing dpo_label_smoothing",
    "train.router_aux_loss_coef": "moe_aux_loss_coeff",
    "train.router_z_loss_coef": "moe_z_loss_coeff",
    "evaluation.every": "eval_interval eval_steps",
    "evaluation.patience": "early_stopping_patience early_stopping_steps",
    "optimizer.groups": "lr_groups embedding_lr",
    "train.freeze (patterns of what stays as it is)": "unfrozen_parameters freeze_trainable_layers",
    "checkpoint.every": "save_interval save_steps",
    "mtp.num_layers": "mtp_num_layers",
    "mtp.loss_scaling_factor": "mtp_loss_scaling_factor",
    "model.path": "model_name_or_path base_model load",
    "model.compute_dtype bfloat16": "bf16 mixed_precision_param",
    "model.frozen nf4 (under adapters, lora.rank)": "load_in_4bit quantization_bit",
    "data.path": "data_path dataset_name dataset datasets dataset_dir",
    "data.chat_template": "chat_template_jinja template",
    "data.rename_columns": "field_messages message_property_mappings columns",
    "data.tokenizer": "tokenizer_model",
    "data.max_document_tokens": "seq_length seq_len sequence_len cutoff_len max_length",
    "evaluation.documents": "eval_iters val_set_size val_size",
    "lora.rank": "lora_r lora_rank adapter finetuning_type",
    "lora.alpha": "lora_alpha",
    "lora.target_modules": "lora_target lora_target_modules",
    "run.dir": "output_dir save",
    "run.loggers": "report_to",
    "leave it out, for plans pack whole documents": "packing sample_packing padding_free pad_to_multiple_of",
    "leave it out, for all ranks share weights, gradients and states": "use_distributed_optimizer fsdp fsdp_config "
    "deepspeed dp_shard_size data_parallel_shard_degree",
    "leave it out, for what the assistant says is learnt": "train_on_inputs train_on_prompt assistant_only_loss "
    "completion_only_loss",
    "leave it out, for the loss is always one sum over targets, divided once": "calculate_per_token_loss",
    "leave it out, for no module holds a global process group": "use_decentralized_pg",
    "leave it out, for the reference is the base model, computed once and kept": "ref_model precompute_ref_log_probs",
    "leave it out, for the kernel is chosen by the GPU": "attn_implementation",
    "leave it out, for context.context_parallel_size and parallel.tp say it": "parallelism_config",
    "leave it out, for a script has it, by with_longspan (docs/trainer.md)": "use_vllm vllm_mode rollout_func",
}
_KEYS = {name: key for key, names in NAMES.items() for name in names.split()}


class OtherName(NamedTuple):
    """What a name of another library is here: `key`, with a `remark` behind it or ""; or, where `key` is "", the advice
    to leave it out, as `remark`.
    """

    key: str
    remark: str


def key_of_other_name(name: str) -> OtherName | None:
    """Return what a name of another library is here, by NAMES, with its section or without; None for other names."""
    name = name.replace("-", "_")
    text = _KEYS.get(name) or _KEYS.get(name.rpartition(".")[2])
    if text is None:
        return None
    key, _, remark = text.partition(" ")
    return OtherName(key, remark) if "." in key else OtherName("", text)
