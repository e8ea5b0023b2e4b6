"""Kernels of FlashAttention-4 that are compiled while ranks start, each kind in a process of its own, into the cache.

A first step calls four kinds of blocks: of one document or several, causal or whole. Each takes FlashAttention-4
(4.0.0b36) seconds to compile, forward and backward, one after another in every rank. A process compiles a kind from
tensors without memory, as that library's own tests fill its cache, and sees no GPU. Ranks load what is there by then
and compile the rest: the kernels are the same, for the cache names them by their source and by all that they depend on.

Not covered: windows, latent attention, more than 256 documents, chunks of few rows, and GPUs other than Hopper's.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.config.sections import ModelConfig, RunConfig
from longspan.launch.worker import Worker, next_request

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

HOPPER = (9, 0)
CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "apache-tvm-ffi")
# Each document has more rows than a block of the kernels.
_ROWS = 2048


@dataclass(frozen=True)
class BlockKind:
    """A kind of block of attention, for which kernels are compiled."""

    several: bool  # whether it has several documents, or one
    causal: bool
    backward: bool

    @property
    def name(self) -> str:
        """The kind as three digits, in the name of the file that notes that its kernels are compiled."""
        return "-".join(str(int(value)) for value in astuple(self))


@contextmanager
def compile_kernels_ahead(
    config: RunConfig, slots: int, capability: tuple[int, int], multiprocessors: int, *, backward: bool
) -> Iterator[None]:
    """Return a context in which processes compile what steps of a model will call; its end ends those still at work.

    `capability` and `multiprocessors` are the GPUs', which the processes do not see. None start where there is no cache
    or it has the kernels, on other GPUs than Hopper's, and where another kernel attends.

    >>> with compile_kernels_ahead(config, 8, (9, 0), 132, backward=True):
    ...     run_on_ranks(train_rank, args, 8)
    """
    with ExitStack() as stack:
        folder = os.environ.get(CACHE, "")
        digest = _kernel_notes_digest(config.model)
        if (
            folder
            and digest
            and capability == HOPPER
            and multiprocessors
            and config.context.attention_kernel in ("", "fa4")
        ):
            environment = {
                "CUDA_VISIBLE_DEVICES": "",
                "FLASH_ATTENTION_ARCH": "sm_90",
                "CUTE_DSL_ARCH": "sm_90a",
                "FLASH_ATTENTION_NUM_SMS": str(multiprocessors),
                "OMP_NUM_THREADS": "1",
            }
            # With several slots there are also blocks without a causal mask, of another slot's keys.
            causal_values = (True,) if slots == 1 else (True, False)
            for kind in [
                BlockKind(several, causal, backward) for several in (True, False) for causal in causal_values
            ]:
                note = Path(folder) / f"ahead-{digest}-{kind.name}"
                if not note.exists():
                    worker = Worker(serve_block_compilation, environment=environment, own_session=True)
                    stack.callback(worker.connection.close)
                    stack.callback(worker.end)
                    worker.send((config.model, kind, note))
        yield


def _kernel_notes_digest(model: ModelConfig) -> str:
    """No digest without FlashAttention-4 or a file of the model."""
    file = None
    if model.source:
        source = Path(model.source)
        file = source / "config.json" if source.is_dir() else source
    try:
        parts = [version(package) for package in _PACKAGES]
        parts.append(model.preset_name if file is None else file.read_text(encoding="utf-8"))
    except (PackageNotFoundError, OSError, ValueError):
        return ""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def serve_block_compilation(connection: "Connection[Any, Any]", parent: int) -> None:
    """Compile one kind of block in a worker, and note that the cache has it.

    `connection` brings one message, (model, kind, note), from `compile_kernels_ahead`; `parent` is the id of the
    process that sends it, without which the worker ends. Output goes to /dev/null. Errors are silent: ranks compile
    what fails here, and raise its error.
    """
    request = next_request(connection, parent)
    if request is not None:
        model, kind, note = request
        os.nice(5)  # ranks that start at the same time go first
        with Path(os.devnull).open("w") as nowhere, suppress(Exception):  # the compilers write to the terminal
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            compile_block_kernels(model, kind)
            note.touch()


def compile_block_kernels(model: ModelConfig, kind: BlockKind) -> None:
    """Compile the kernels of a kind of block of a model in bfloat16, from fake tensors: forward, and `kind.backward`.

    Raises ValueError for latent attention.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from longspan.attention.call import AttendCall, Saved
    from longspan.attention.kernels import fa4
    from longspan.attention.tiles import Launch, Tile, Tiling
    from longspan.model import preset_config
    from longspan.model.weights.hf_folder import read_configuration

    configuration: Any = (
        read_configuration(Path(model.source)) if model.source else preset_config(model.preset_name, vocab_size=256)
    )
    text = configuration.get_text_config()
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", 0) or heads)
    size = int(getattr(text, "head_dim", 0) or text.hidden_size // heads)
    if getattr(text, "kv_lora_rank", None):
        raise ValueError("latent attention")
    device = torch.device("cuda")
    documents = 2 if kind.several else 1
    with FakeTensorMode():
        right = 0 if kind.causal else None  # keys that a row sees after its own position; None: all
        starts = [document * _ROWS for document in range(documents)]
        tiles = [Tile(start, start + _ROWS, start, start + _ROWS, right=right) for start in starts]
        launch = Launch(Tiling.from_tiles(tiles), device)
        ends = tuple(torch.empty(documents + 1, dtype=torch.int32, device=device) for _ in range(2))
        vars(launch)["cu_seqlens"] = ends  # the property would copy to a GPU; values are not read here
        call = AttendCall(heads, kv_heads, size, size, torch.bfloat16, device, scale=size**-0.5)
        q, k, v = (
            torch.empty(documents * _ROWS, count, size, dtype=torch.bfloat16, device=device)
            for count in (heads, kv_heads, kv_heads)
        )
        out, lse = fa4.forward(q, k, v, launch, call)
        if kind.backward:
            deltas = torch.empty_like(lse)
            fa4.backward(torch.empty_like(out), Saved(q, k, v, deltas, lse), launch, call)
