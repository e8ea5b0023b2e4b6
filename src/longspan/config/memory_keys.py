"""What the keys of memory say together: a run's form, whether a plan of memory chooses, and what is left to it."""

from typing import Any

from longspan.config.keys import AUTO, key_value, section_keys
from longspan.config.sections import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from longspan.errors import ConfigError
from longspan.plan.form import CHOSEN, ON_HOST, FixedMemory, Form
from longspan.plan.memory.settings import LEAST_OF_GPU, UPDATES_PARTS, bytes_hint

# The keys of fields of the form by full name; those that have the field's name are found by it.
FORM_KEYS = {
    **{
        key.name: f"{kind.SECTION}.{key.name}"
        for kind in (ModelConfig, ParallelConfig, TrainConfig)
        for key in section_keys(kind)
        if key.name in Form.__dataclass_fields__
    },
    "checkpoint_policies": "train.activation_checkpointing",
    "compiled": "train.compile",
    "mtp_layers": "mtp.num_layers",
}
# Keys by which less may fit: those of what a plan of memory chooses, and of whether it does.
MEMORY_KEYS = (
    "train.plan_memory",
    "train.device_memory_limit",
    *(FORM_KEYS[name] for name in ("checkpoint_policies", *CHOSEN) if name in FORM_KEYS),
)


def read_key(config: RunConfig, name: str) -> Any:
    """Return the value of a key such as "context.planner", as JSON and TOML have it."""
    section, _, key = name.partition(".")
    value = key_value(getattr(config, section), key)
    return list(value) if isinstance(value, tuple) else value


def form_of_config(config: RunConfig) -> Form:
    """Return the form that the keys give a run; what they leave to a plan of memory has its default."""
    values = {name: read_key(config, key) for name, key in FORM_KEYS.items()}
    if values["checkpoint_policies"] == AUTO:
        values["checkpoint_policies"] = None
    return Form(**values)


def keys_of_states_on_host(config: RunConfig) -> list[str]:
    """Return the keys that are true and by which moments wait on the host; adapters, and theirs, stay on the device."""
    form = form_of_config(config)
    keys = {"offload_optimizer_states": True, "offload_weights": not config.lora.rank}
    return [FORM_KEYS[name] for name, moves in keys.items() if moves and getattr(form, name)]


def chooses_memory(train: TrainConfig, *, gpu: bool) -> bool:
    """Return whether a plan of memory chooses how a run saves memory; on CPUs only with `device_memory_limit`."""
    return train.plan_memory and (gpu or train.device_memory_limit > 0)


def fixed_memory_keys(config: RunConfig, *, gpu: bool = True) -> FixedMemory:
    """Read the keys of memory that are given by hand; None is what the plan of memory may choose."""
    form = form_of_config(config)
    defaults = Form()
    by_hand = not chooses_memory(config.train, gpu=gpu)
    fixed = {name: getattr(form, name) for name in CHOSEN}
    if not by_hand:
        fixed = {name: None if value == getattr(defaults, name) else value for name, value in fixed.items()}
    # A class of another package may update the parts of a parameter together; adapters stay on the device.
    name = config.optimizer.class_
    updates_parts = name in UPDATES_PARTS and not config.optimizer.moments
    if fixed["offload_optimizer_states"] is None and not (updates_parts and name in ("adamw", "sgd")):
        fixed["offload_optimizer_states"] = False
    if fixed["offload_weights"] is None and not (updates_parts or config.lora.rank):
        fixed["offload_weights"] = False
    policy = form.checkpoint_policies
    kept = None
    offload = False if by_hand else None
    if isinstance(policy, str):
        kept = policy.removesuffix(ON_HOST)
        offload = True if policy.endswith(ON_HOST) else offload
    elif by_hand:
        kept = "none"
    return FixedMemory(activation_checkpointing=kept, offload_activations=offload, **fixed)


def check_gpu_memory_limit(train: TrainConfig) -> None:
    """Raise ConfigError for a `device_memory_limit` that is too small for any GPU, as one given in gigabytes is."""
    if 0 < train.device_memory_limit < LEAST_OF_GPU:
        raise ConfigError(
            f"train.device_memory_limit is {train.device_memory_limit}: {bytes_hint(train.device_memory_limit)}"
        )
