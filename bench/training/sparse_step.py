"""A step of four layers whose rows choose pools or blocks, or see entries, of published widths, at degree 1 and 2.

    torchrun --nproc_per_node 2 bench/training/sparse_step.py --out bench/records/sparse-step.json
    torchrun --nproc_per_node 2 bench/training/sparse_step.py --tiny                   # on CPUs
    python bench/training/sparse_step.py --kinds QSA --write runs/QSA                  # config.json, for bench step

Weights are random, in float32 with arithmetic in bfloat16, of 16 experts a layer and a vocabulary of 32,768, sharded
over both GPUs; layers are recomputed. One document: on one rank, and over both, with the same weights. The record has
both losses, which share of rows chose other keys at degree 2 in any layer, seconds and peak bytes.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.attention.sparse_layers import KINDS
from bench.begun import missing_row, open_record, peak_bytes, seconds_now, start_peak, write_page
from torch import Tensor

from longspan import Layout, World, load_model, plan_fixed, prepare, run_step
from longspan.cli.machine import set_gpu_environment
from longspan.data.synthetic_documents import synthetic_documents
from longspan.errors import LongspanError
from longspan.model.kinds import attends_to_entries, find_indexers
from longspan.model.seams.running_layer import running_layer
from longspan.plain_text import bytes_text, markdown_table
from longspan.train import build_optimizer

LAYERS = 4
EXPERTS = {
    "QSA": "num_experts",
    "CSA": "n_routed_experts",
    "HCA": "n_routed_experts",
    "MiniMax-M3": "num_local_experts",
}
TINY_FEED = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
TINY = {
    "QSA": TINY_FEED
    | {"shared_expert_intermediate_size": 32, "hc_lowrank": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "CSA": TINY_FEED,
    "HCA": TINY_FEED,
    "MiniMax-M3": {"intermediate_size": 32, "shared_intermediate_size": 32, "num_experts_per_tok": 2},
}


def make_config(name: str, *, tiny: bool) -> Any:
    changes = {EXPERTS[name]: 4 if tiny else 16, "vocab_size": 97 if tiny else 32768, **(TINY[name] if tiny else {})}
    changes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 1 << 20}
    if name in ("CSA", "HCA"):
        # Layers that route by a hash of tokens are left out.
        changes |= {"mlp_layer_types": ["moe"] * LAYERS, "num_nextn_predict_layers": 0}
    return KINDS[name].make_config(tiny=tiny, layers=LAYERS, **changes)


@contextmanager
def noted_choices(model: Any) -> Iterator[list[Tensor]]:
    """Inside, the list gets what the rows of each layer chose, in the order of the document, on the first rank."""
    noted: list[Tensor] = []

    def note(_: Any, __: Any, out: Any) -> None:
        out = out[1] if isinstance(out, tuple) else out
        chosen = getattr(out, "chosen", out)
        if not chosen.shape[-1]:
            return
        shard: Any = running_layer().shard
        rows = chosen[0].transpose(0, 1).flatten(1) if chosen.ndim == 4 else chosen[0]
        gathered = shard.gather(rows.contiguous())
        noted.append(gathered.cpu().unflatten(1, (-1, chosen.shape[-1])).sort(-1).values)

    compressors = [module.compressor for module in model.modules() if attends_to_entries(module)]
    modules = compressors or list(find_indexers(model).values())
    hooks = [module.register_forward_hook(note) for module in modules]
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


def measure(name: str, flags: argparse.Namespace, world: World) -> dict[str, Any]:
    config = make_config(name, tiny=flags.tiny)
    rows = flags.rows or (192 if flags.tiny else 65536)
    options = {"activation_checkpointing": "full", "compute_dtype": torch.bfloat16}
    model = prepare(load_model(config=config, dtype="float32", sharded=True), world, **options)
    documents = synthetic_documents([rows], config.vocab_size)
    plans = {degree: plan_fixed([rows], world.home, cp=degree) for degree in sorted({1, world.home.slots})}
    row: dict[str, Any] = {"rows": rows}
    choices = dict[int, list[Tensor]]()
    for degree, plan in plans.items():
        with noted_choices(model) as noted:
            row[f"loss, degree {degree}"] = run_step(model, plan, documents, world, backward=False).loss
        choices[degree] = noted
    of_one, of_all = choices[1], choices[world.home.slots]
    differs = [(a != b).any(-1).any(-1) for a, b in zip(of_one, of_all, strict=True)]
    row["rows that choose otherwise"] = torch.stack(differs).any(0).double().mean().item() if differs else 0.0
    row["choices that differ"] = torch.stack(differs).double().mean().item() if differs else 0.0
    optimizer = build_optimizer(model, lr=1e-6)
    for degree, plan in plans.items():
        seconds = list[float]()
        for step in range(flags.steps + 1):
            start_peak()
            world.control.gather_objects(None)  # all begin together
            started = seconds_now()
            run_step(model, plan, documents, world, optimizer=optimizer)
            seconds += [seconds_now() - started] if step else []
        of_ranks = world.control.gather_objects((statistics.median(seconds), peak_bytes()))
        row[f"seconds, degree {degree}"] = max(x[0] for x in of_ranks)
        row[f"bytes, degree {degree}"] = max(x[1] for x in of_ranks)
    return row


def markdown(record: dict[str, Any]) -> str:
    names = list(dict.fromkeys(name for row in record["kinds"].values() for name in row))
    lines = [(kind, *(_cell(name, row.get(name, "–")) for name in names)) for kind, row in record["kinds"].items()]
    return markdown_table(("four layers of", *names), lines)


def _cell(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return bytes_text(value) if name.startswith("bytes") and isinstance(value, int) else str(value)
    return f"{value:.6f}" if name.startswith("loss") else f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="small widths, 192 rows")
    parser.add_argument("--write", type=Path, help="write the configuration of the one kind to this folder, and end")
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    if flags.write is not None:
        make_config(flags.kinds, tiny=flags.tiny).save_pretrained(flags.write)
        return
    if torch.cuda.is_available():
        set_gpu_environment()
    with World(Layout(ranks=int(os.environ.get("WORLD_SIZE", "1")))) as world:
        about = {"ranks": world.home.slots, "tiny": flags.tiny}
        record = open_record("sparse step", flags.out, world.backend, Path(__file__).parent, **about)
        kinds = record.setdefault("kinds", {})
        for name in flags.kinds.split(","):
            if name in kinds:
                continue
            try:
                kinds[name] = measure(name, flags, world)
            except (torch.OutOfMemoryError, LongspanError) as error:
                kinds[name] = missing_row(error)
            if world.rank == 0:
                print(name, kinds[name], flush=True)
                if flags.out is not None:
                    flags.out.write_text(json.dumps(record, indent=1))
        if world.rank == 0:
            write_page(record, flags.out, "Steps of four layers that choose", markdown(record))


if __name__ == "__main__":
    main()
