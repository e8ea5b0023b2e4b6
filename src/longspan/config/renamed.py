"""Keys of version 0.3 and what they are now: for errors, `longspan upgrade`, the folders of older runs and their
docs."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

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
# Keys of 0.3 that are gone, and what to write instead: in `REPLACING`, or nothing.
GONE = {
    "train.offload_activations": 'train.activation_checkpointing = "full+host" or "selective+host"',
    "train.fused_norms": "nothing: norms are fused on GPUs; in Python prepare(fused_norms=)",
    "train.betas": 'optimizer.arguments = ["betas=[0.9, 0.95]"], the default of adamw',
    # of tables, under which plans change no figure
    f"{OLD_SETS}.planner": "nothing, or context_parallel_size; evaluation.planner is that of all sets without it",
    f"{OLD_SETS}.min_dynamic_context_parallel_size": "evaluation.min_dynamic_context_parallel_size, for all sets",
    f"{OLD_SETS}.max_dynamic_context_parallel_size": "evaluation.max_dynamic_context_parallel_size, for all sets",
    f"{OLD_SETS}.hierarchical_context_parallel_sizes": "nothing: evaluation's sizes are fitted to the set's degree",
}
REPLACING = ("train.activation_checkpointing", "optimizer.arguments")
# By key of now: the values of 0.3 that are other ones now.
VALUES: dict[str, dict[str, Any]] = {
    "data.split_turns": {"together": False, "split": True},
    "train.plan_memory": {"auto": True, "none": False},
    "train.float8": {"rows": "rowwise"},
}


def renamed_value(key: str, value: Any) -> Any:
    """Return the value that `key`, as it is called now, has in place of `value`.

    >>> renamed_value("train.float8", "rows")
    'rowwise'
    """
    return VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value


def renamed_hint(old: str, value: Any = None, *, flag: bool = False) -> str:
    """Say what a key of 0.3 is now, with its value where another word stands for it; "" for other keys.

    >>> renamed_hint("train.memory", "none"), renamed_hint("train.memory", "none", flag=True)
    ('it is train.plan_memory = false now', 'it is --train.plan_memory false now')
    """
    if old in GONE:
        return f"it is gone; write {GONE[old]}"
    if old not in RENAMED:
        return ""
    new = RENAMED[old]
    before, equals = ("--", " ") if flag else ("", " = ")
    text = f"it is {before}{new}"
    if isinstance(value, str) and (word := renamed_value(new, value)) != value:
        shown = str(word).lower() if isinstance(word, bool) else word if flag else f'"{word}"'
        text += f"{equals}{shown}"
    return f"{text} now"


def upgraded_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a configuration with the keys of now; those of now, and unknown ones, stay as they are. A
    section from which all has moved is none.

    >>> upgraded_tables({"train": {"memory": "none", "lr": 0.1}, "eval": [{"name": "books"}]})
    {'train': {'plan_memory': False}, 'optimizer': {'lr': 0.1}, 'evaluation': {'sets': [{'name': 'books'}]}}
    """
    result: dict[str, Any] = {}
    for section, values in tables.items():
        if section == OLD_SETS:
            result.setdefault("evaluation", {})["sets"] = _upgraded_sets(values)
        elif not isinstance(values, Mapping):
            result[section] = values
        else:
            for key, value in values.items():
                new = RENAMED.get(f"{section}.{key}", f"{section}.{key}")
                new_section, _, new_key = new.partition(".")
                new_value = _upgraded_sets(value) if new == SETS else renamed_value(new, value)
                result.setdefault(new_section, {})[new_key] = new_value
    _replace_gone_keys(result)
    return result


def _upgraded_sets(tables: Any) -> Any:
    if not _are_tables(tables):
        return tables
    return [{key: x for key, x in table.items() if f"{OLD_SETS}.{key}" not in GONE} for table in tables]


def _are_tables(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(table, Mapping) for table in values)


def gone_keys_of_sets(tables: Mapping[str, Any]) -> list[str]:
    """List the keys that are gone of the tables of evaluation sets, each once, as `GONE` has them."""
    evaluation = tables.get("evaluation")
    both: tuple[Any, ...] = (
        tables.get(OLD_SETS),
        evaluation.get("sets") if isinstance(evaluation, Mapping) else None,
    )
    names = (f"{OLD_SETS}.{key}" for sets in both if _are_tables(sets) for table in sets for key in table)
    return [name for name in dict.fromkeys(names) if name in GONE]


def _replace_gone_keys(tables: dict[str, Any]) -> None:
    train = tables.get("train", {})
    if not isinstance(train, dict):
        return
    values = {key: train.pop(key[6:]) for key in GONE if key.startswith("train.") and key[6:] in train}
    checkpointing = train.get("activation_checkpointing", "auto")
    if values.get("train.offload_activations") and checkpointing not in ("auto", "none", False):
        train["activation_checkpointing"] = ("full" if checkpointing is True else checkpointing) + "+host"
    betas = values.get("train.betas", [0.9, 0.95])
    if [*betas] != [0.9, 0.95]:
        optimizer = tables.setdefault("optimizer", {})
        optimizer["arguments"] = [*optimizer.get("arguments", ()), f"betas={json.dumps(betas)}"]
    if values and not train:
        del tables["train"]


def flag_lines() -> Iterator[str]:
    """Write the flags of 0.3 and what they are now, for the help of `train`."""
    width = max(map(len, RENAMED)) + 2
    for old, new in RENAMED.items():
        values = ", ".join(f"{a} is {str(b).lower()}" for a, b in VALUES.get(new, {}).items())
        yield f"    --{old:<{width}}--{new}" + (f" ({values})" if values else "")
    for old, advice in GONE.items():
        if not old.startswith(f"{OLD_SETS}."):
            yield f"    --{old:<{width}}{advice}"


def upgrade_table() -> str:
    """Write the table of docs/upgrade.md, in Markdown."""
    rows = [f"| `[[{OLD_SETS}]]` | `[[{SETS}]]` |  |"]
    for old, new in RENAMED.items():
        rows.append(f"| `{old}` | `{new}` | {_value_texts(new)} |")
    rows += [f"| `{key}` | `{key}` | {_value_texts(key)} |" for key in VALUES if key not in RENAMED.values()]
    rows += [f"| `{old}` |  | gone; write {advice} |" for old, advice in GONE.items()]
    return "\n".join(["| in 0.3 | in 0.4 | values |", "|---|---|---|", *rows])


def _value_texts(key: str) -> str:
    def text(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else f'"{value}"'

    return ", ".join(f"`{text(old)}` is `{text(new)}`" for old, new in VALUES.get(key, {}).items())
