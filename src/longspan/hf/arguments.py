"""`LongspanArguments`: how ranks share the documents of a Trainer, by the keys of [context] and [parallel]."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from longspan.config.file import load_config
from longspan.config.keys import NOT_GIVEN
from longspan.config.sections import RunConfig
from longspan.errors import LongspanError
from longspan.layout import Layout
from longspan.run.checks import check_keys_needed_by_keys, check_parallel, check_plans

# Other keys are those of [context].
_SECTIONS = {
    **dict.fromkeys(
        ("tp", "pp", "ep", "dp_replicate", "sequence_parallel", "reshard_after_forward", "sync_each_batch"),
        "parallel",
    ),
    **dict.fromkeys(("plan_memory", "device_memory_limit", "offload_weights"), "train"),
    "machine": "run",
    "frozen": "model",
}


def _argument(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class LongspanArguments:
    """How ranks share documents in a Trainer, by keys of `longspan train` with the same defaults.

    >>> LongspanArguments(context_parallel_size=4, eval_context_parallel_size=8).config().context.planner
    'fixed'

    The keys of [context], those of [evaluation] with the prefix eval_, and of [parallel]; `plan_memory`, its bound and
    `offload_weights` of [train]; `machine` of [run]; `frozen` of [model]. A dataclass that transformers'
    HfArgumentParser reads. Raises ConfigError where it is made, for values that no key takes.
    """

    planner: str = _argument("", "auto, fixed, dynamic or padded; empty: auto, or fixed with a degree")
    context_parallel_size: int | None = _argument(
        NOT_GIVEN, "ranks that share a document in training; 0: the fastest degree"
    )
    min_dynamic_context_parallel_size: int = _argument(1, "smallest degree of dynamic plans")
    max_dynamic_context_parallel_size: int = _argument(0, "largest degree of dynamic plans; 0: no limit")
    max_tokens_per_slot: str = _argument(
        "auto", "rows of a micro-batch on a slot, at most; 0: no limit; auto: by memory"
    )
    cp_comm_type: str = _argument("auto", "p2p, all_gather, a2a, a2a+p2p or auto")
    partition: str = _argument("auto", "zigzag, contiguous or auto")
    hierarchical_context_parallel_sizes: list[int] = field(
        default_factory=list, metadata={"help": "sizes (a2a, p2p) of a2a+p2p; empty: the best ones"}
    )
    attention_kernel: str = _argument("", "attention kernel; empty: the first that can")
    node_size: str = _argument("auto", "slots of one host")
    mode: str = _argument("auto", "lockstep, free or auto: who waits in training")
    eval_planner: str = _argument("", "planner of evaluation; empty: as in training, or fixed with a degree")
    eval_context_parallel_size: str = _argument("", "ranks that share a document in evaluation; auto: the fastest")
    eval_max_dynamic_context_parallel_size: int | None = _argument(
        NOT_GIVEN, "largest degree of evaluation; as in training"
    )
    eval_max_tokens_per_slot: str = _argument("", "rows of a micro-batch on a slot in evaluation")
    eval_cp_comm_type: str = _argument("", "communication type of evaluation")
    eval_hierarchical_context_parallel_sizes: list[int] = field(
        default_factory=list, metadata={"help": "as training's"}
    )
    tp: int = _argument(1, "tensor-parallel degree")
    pp: int = _argument(1, "pipeline stages: 1; a Trainer has no others")
    ep: int = _argument(1, "expert-parallel degree")
    dp_replicate: int = _argument(1, "copies of the sharded weights (HSDP)")
    sequence_parallel: bool = _argument(False, "split rows of norms over tensor-parallel ranks")
    reshard_after_forward: bool = _argument(True, "free gathered weights after each pass")
    sync_each_batch: bool = _argument(True, "sum gradients in every micro-batch; false: once a step")
    plan_memory: bool = _argument(True, "what layers keep is chosen by memory; false: as the arguments have it")
    device_memory_limit: int = _argument(0, "bytes that a rank may fill; 0: 92 % of a GPU's free memory")
    offload_weights: bool = _argument(False, "keep weights, gradients and moments on the host")
    machine: str = _argument("", "the machine that prices plans (longspan bench calibrate)")
    frozen: str = _argument(
        "",
        "weights under an adapter: nf4 (4 bits), stored, whole; empty: stored where they were loaded in 4 or 8 bits",
    )

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> RunConfig:
        """Return the configuration that these keys make, with the defaults of a run on a model folder."""
        # Any name will do: without one it would be the demo's model.
        keys: dict[str, object] = {"model.config": "the Trainer's model"}
        if self.frozen:
            keys["lora.rank"] = 1  # a key that it needs: the model brings an adapter
        for name in (key.name for key in fields(self)):
            value = getattr(self, name)
            # a key that was not given
            if value in (NOT_GIVEN, "", []):
                continue
            if isinstance(value, str) and re.fullmatch(
                "-?[0-9]+", value
            ):  # fields for "auto" or a number are strings
                value = int(value)
            section = "evaluation" if name.startswith("eval_") else _SECTIONS.get(name, "context")
            keys[f"{section}.{name.removeprefix('eval_')}"] = value
        with reword_errors_for_scripts():
            return load_config(None, keys)

    def home(self, ranks: int) -> Layout:
        """Return the layout of `ranks` ranks. Raises ConfigError for keys that do not fit it, or each other."""
        home = Layout(ranks=ranks, tp=self.tp, ep=self.ep, dp_replicate=self.dp_replicate)
        config = self.config()
        with reword_errors_for_scripts():
            check_parallel(home)
            check_keys_needed_by_keys(config)
            check_plans(config, home, training=True)
        return home


# What messages of `longspan train` say, and a script does not have: a pattern, and what takes its place.
_WORDS = {
    r"\bevaluation\.(?=[a-z])": "eval_",
    rf"\b(context|parallel|train|run|model)\.(?=({'|'.join(key.name for key in fields(LongspanArguments))})\b)": "",
    r"\(--world (\d+), or torchrun\)": r"(torchrun --nproc-per-node \1; accelerate launch --cpu starts only one)",
    r" in the overrides": "",
    r"data\.max_document_tokens 1\b": "a document of 1 token",
}


@contextmanager
def reword_errors_for_scripts() -> Iterator[None]:
    """Rewrite the messages of LongspanErrors raised inside: keys and launchers as a script names them (`_WORDS`)."""
    try:
        yield
    except LongspanError as error:
        text = str(error)
        for pattern, words in _WORDS.items():
            text = re.sub(pattern, words, text)
        error.args = (text, *error.args[1:])
        raise
