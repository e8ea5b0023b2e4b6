"""Two packed documents at degree 2 by axolotl's context parallelism, beside the stock model and longspan, on CPUs.

    pip install axolotl-ringmaster==0.2.7
    torchrun --nproc_per_node 2 bench/peers/packed_ringmaster.py --out ringmaster.json

Documents of 24 and 40 tokens, small copies of gpt-oss (sinks, windows) and of Gemma 2 (a soft cap of 2.0, so that it
shows), in float32. The stock model sees each document alone. The last column is the stock model without what the second
has: sinks or soft cap.
"""

import argparse
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import ringmaster
import torch
import torch.distributed as dist
from bench.begun import open_record, write_page
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Gemma2Config

from longspan import Layout, World, plan_fixed, prepare, run_step
from longspan.model import preset_config
from longspan.plain_text import markdown_table

LENGTHS = (24, 40)
VOCABULARY = 128
COLUMNS = ("model", "stock, one by one", "longspan, degree 2", "ringmaster, degree 2", "stock without sinks; soft cap")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("ringmaster.json"), help="the record")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    documents = [torch.randint(0, VOCABULARY, (length,)) for length in LENGTHS]
    rows = list[dict[str, Any]]()
    for name, draw in (("gpt-oss", draw_gpt_oss), ("Gemma 2", draw_gemma_2)):
        sides = {"stock": stock_loss, "longspan": longspan_loss, "ringmaster": ringmaster_loss}
        row = {side: loss(draw(), documents) for side, loss in sides.items()}
        rows.append({"model": name, **row, "bare": stock_loss(draw(bare=True), documents)})
    if dist.get_rank() == 0:
        record = open_record("ringmaster", None, "gloo", Path(__file__).parent, lengths=LENGTHS, rows=rows)
        cells = [
            [row["model"], *(f"{row[side]:.6f}" for side in ("stock", "longspan", "ringmaster", "bare"))]
            for row in rows
        ]
        page = markdown_table(COLUMNS, cells)
        write_page(record, options.out, f"ringmaster {ringmaster.__version__}", page)
    dist.destroy_process_group()
    return 0


def draw_gpt_oss(bare: bool = False) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        preset_config("gpt-oss-tiny", vocab_size=VOCABULARY), attn_implementation="eager"
    )
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-torch.inf if bare else 1.0)
    return model


def draw_gemma_2(bare: bool = False) -> Any:
    torch.manual_seed(1)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        # Scores of a random model are small.
        query_pre_attn_scalar=1,
        initializer_range=0.2,
        attn_logit_softcapping=None if bare else 2.0,
        final_logit_softcapping=None,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def stock_loss(model: Any, documents: list[Tensor]) -> float:
    targets = sum(len(document) - 1 for document in documents)
    losses = [model(input_ids=x[None], labels=x[None]).loss.item() * (len(x) - 1) for x in documents]
    return sum(losses) / targets


def longspan_loss(model: Any, documents: list[Tensor]) -> float:
    with World(Layout(2), backend="gloo") as world:
        plan = plan_fixed(list(LENGTHS), world.home, cp=2)
        return run_step(prepare(model, world), plan, [x.numpy() for x in documents], world).loss


def ringmaster_loss(model: Any, documents: list[Tensor]) -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    config = ringmaster.RingmasterConfig(size=2, backend=ringmaster.Backend.ULYSSES)
    heads = model.config.num_key_value_heads
    runtime = ringmaster.setup(config, num_kv_heads=heads, device_mesh=mesh, device_type="cpu", inner_attn="sdpa")
    model.set_attn_implementation(runtime.attn_implementation)
    ids = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(len(x)) for x in documents])[None]
    labels = torch.cat([torch.cat([torch.tensor([-100]), x[1:]]) for x in documents])[None]
    model.eval()
    with ringmaster.ContextParallelContextManager([model], mesh.get_group("cp")), torch.no_grad():
        loss = model(input_ids=ids, position_ids=positions, labels=labels).loss
    ringmaster.teardown()
    return float(loss)


if __name__ == "__main__":
    sys.exit(main())
