"""Flags of Megatron-LM by the flags of this command line that do the same, for the error of a flag that does not exist.

A hint names a flag, and a value behind it if Megatron-LM's flag is a switch. The first flag that a verb has is used:
one with a section is of `train`, `eval` and `bench step`, and one without is of `plan`.
"""

from collections.abc import Collection, Mapping

# Without leading dashes and with underscores.
HINTS: Mapping[str, tuple[str, ...]] = {
    # context parallelism
    "context_parallel_size": ("--context.context_parallel_size", "--cp"),
    "cp_comm_type": ("--context.cp_comm_type",),
    "hierarchical_context_parallel_sizes": ("--context.hierarchical_context_parallel_sizes",),
    "dynamic_context_parallel": ("--context.planner dynamic", "--planner dynamic"),
    "hybrid_context_parallel": ("--context.planner dynamic", "--planner dynamic"),
    "min_dynamic_context_parallel_size": ("--context.min_dynamic_context_parallel_size", "--min_cp"),
    "max_seqlen_per_dp_cp_rank": ("--context.max_tokens_per_slot", "--max_tokens_per_slot"),
    "sequence_packing_scheduler": ("--context.planner", "--planner"),
    # other parallelism
    "tensor_model_parallel_size": ("--parallel.tp", "--tp"),
    "pipeline_model_parallel_size": ("--parallel.pp", "--pp"),
    "num_virtual_stages_per_pipeline_rank": ("--parallel.vpp", "--vpp"),
    "expert_model_parallel_size": ("--parallel.ep",),
    "num_distributed_optimizer_instances": ("--parallel.dp_replicate", "--dp_replicate"),
    "sequence_parallel": ("--parallel.sequence_parallel",),
    # steps and the optimizer
    "train_iters": ("--train.steps",),
    "lr_warmup_iters": ("--train.warmup_steps",),
    "lr_decay_style": ("--train.schedule",),
    "clip_grad": ("--train.max_grad_norm",),
    "recompute_granularity": ("--train.activation_checkpointing",),
    "recompute_num_layers": ("--train.recompute_layers",),
    "moe_aux_loss_coeff": ("--train.router_balance_loss",),
    "moe_z_loss_coeff": ("--train.router_z_loss",),
    "mtp_num_layers": ("--mtp.depths", "--mtp_depths"),
    "mtp_loss_scaling_factor": ("--mtp.loss_weight",),
    "bf16": ("--model.compute_dtype bfloat16",),
    # data and the run
    "data_path": ("--data.path", "--data"),
    "tokenizer_model": ("--data.tokenizer", "--tokenizer"),
    "seq_length": ("--data.max_document_tokens", "--max_document_tokens"),
    "eval_interval": ("--train.eval_every",),
    "save_interval": ("--train.save_every",),
    "save": ("--run.dir",),
    "load": ("--model.path", "--model"),
}


def megatron_hint(flag: str, flags: Collection[str]) -> str:
    """Return a sentence that names the flag of a verb that does what a flag of Megatron-LM does; "" if none does.

    `flag` is the one that the verb lacks, `flags` are those that it has.

    >>> megatron_hint("--max_seqlen_per_dp_cp_rank", ["--slots", "--max_tokens_per_slot"])
    'the flag of Megatron-LM is here --max-tokens-per-slot'
    """
    hints = (hint for hint in HINTS.get(flag[2:], ()) if hint.partition(" ")[0] in flags)
    if not (hint := next(hints, "")):
        return ""
    name, _, value = hint.partition(" ")
    name = name if "." in name else name.replace("_", "-")  # keys are written as in files
    return f"the flag of Megatron-LM is here {' '.join(filter(None, (name, value)))}"
