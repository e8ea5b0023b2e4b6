"""Names of keys in other libraries, for errors; docs/migration.md has them in its tables."""

from typing import NamedTuple

from longspan.config.preference_losses import LOSSES

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
    "context_parallel.backend context_parallel_backend cp_mode",
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
    "train.activation_checkpointing": "recompute_granularity gradient_checkpointing activation_checkpoint.mode "
    "use_gradient_checkpointing",
    "train.compile": "compile.enable",
    f"train.loss ({', '.join(LOSSES)})": "loss_type rl stage pref_loss",
    "train.loss_arguments (beta=0.1)": "beta rl_beta pref_beta",
    "train.loss_arguments (simpo_gamma=0.5)": "simpo_gamma",
    "train.loss_arguments (cpo_alpha=0)": "cpo_alpha",
    "train.loss_arguments (desirable_weight=1)": "desirable_weight kto_desirable_weight kto_chosen_weight",
    "train.loss_arguments (undesirable_weight=1)": "undesirable_weight kto_undesirable_weight kto_rejected_weight",
    "train.loss_arguments (label_smoothing=0.1)": "label_smoothing dpo_label_smoothing",
    "teacher.path": "teacher_model_name_or_path",
    "distillation.top_k": "loss_top_k teacher_top_k",
    "distillation.cross_entropy_weight": "uld_crossentropy_weight",
    "train.router_aux_loss_coef": "moe_aux_loss_coeff",
    "train.router_z_loss_coef": "moe_z_loss_coeff",
    "evaluation.every": "eval_interval eval_steps",
    "evaluation.context_parallel_size": "eval_context_parallel_size",
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
    "data.max_document_tokens": "seq_length seq_len sequence_len cutoff_len max_length max_seq_length",
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
