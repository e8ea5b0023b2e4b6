"""What other libraries call the keys of a configuration, for errors; docs/migration.md has the names in its tables."""

# A key and what is behind it, or why none is needed; and the names of others, without dashes and sections.
NAMES = {
    "context.planner dynamic": "dynamic_context_parallel hybrid_context_parallel",
    "context.planner (dynamic for default_dynamic_cp, fixed for dp_balanced)": "sequence_packing_scheduler",
    "context.max_tokens_per_slot": "max_seqlen_per_dp_cp_rank",
    "context.context_parallel_size": "cp_size parallelism_config_cp_size context_parallel_degree "
    "sequence_parallel_size sequence_parallel_degree",
    "context.context_parallel_size (with context.cp_comm_type a2a)": "sp_size parallelism_config_sp_size",
    "context.cp_comm_type": "cp_comm_strategy parallelism_config_cp_comm_strategy context_parallel_rotate_method",
    "parallel.tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel_degree tp_size",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel_degree",
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
    "train.activation_checkpointing": "recompute_granularity gradient_checkpointing",
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
    "data.path": "data_path dataset_name dataset datasets",
    "data.tokenizer": "tokenizer_model",
    "data.max_document_tokens": "seq_length seq_len sequence_len cutoff_len max_length",
    "evaluation.documents": "eval_iters val_set_size val_size",
    "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.target_modules": "lora_target lora_target_modules",
    "run.dir": "output_dir save",
    "run.loggers": "report_to",
    "leave it out, for plans pack whole documents": "packing sample_packing padding_free pad_to_multiple_of",
    "leave it out, for all ranks share weights, gradients and states": "use_distributed_optimizer fsdp fsdp_config "
    "deepspeed dp_shard_size data_parallel_shard_degree",
}
_KEYS = {name: key for key, names in NAMES.items() for name in names.split()}


def key_of_other_name(name: str) -> str:
    """Return the key that a name of another library stands for, with what is behind it in NAMES; "" for other names."""
    return _KEYS.get(name.rpartition(".")[2].replace("-", "_"), "")
