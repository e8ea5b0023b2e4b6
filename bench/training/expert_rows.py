"""Milliseconds of gpt-oss-20b's experts beside their products: the gate with its biases, and the sum of visits.

    python bench/training/expert_rows.py --out bench/records/expert-rows-H200.json   # about 20 seconds, one GPU

Each is run forward and backward as torch's operations do it (the class's own gate, biases as rows of their own) and by
the kernels, with frozen experts, as under adapters of attention, and with trained ones, whose biases have gradients.
"All" are experts whole, with their products, from a layer's rows and back. The least that memory allows is of
`BYTES_PER_SECOND`. --small tries it on a CPU, without kernels.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record, write_page
from bench.training.float8_layer import time_calls
from torch import Tensor, nn
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from longspan.model.experts import expert_products, visits
from longspan.model.experts.expert_products import apply_gate, find_gate_formulas
from longspan.model.experts.moe import mix_experts
from longspan.model.experts.visits import ExpertBiases, Visits, sum_visits
from longspan.plain_text import markdown_table

# Copies reach this of an H200's memory.
BYTES_PER_SECOND = 4.2e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16384])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="few rows and small experts on a CPU")
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    record = open_record("expert rows", None, "none" if flags.small else "nccl", Path(__file__).parent)
    rows = [64] if flags.small else flags.rows
    record["rows"] = [row for count in rows for trained in (False, True) for row in time_experts(count, trained, flags)]
    titles = ["rows", "experts", "part", "torch, ms", "kernels, ms", "times", "least, ms"]
    text = markdown_table(titles, [table_row(row) for row in record["rows"]])
    write_page(record, flags.out, "Rows of gpt-oss-20b's experts", text)


def time_experts(rows: int, trained: bool, flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device, dtype = ("cpu", torch.float32) if flags.small else ("cuda", torch.bfloat16)
    config = GptOssConfig(**({"hidden_size": 32, "intermediate_size": 32} if flags.small else {}), num_local_experts=32)
    torch.manual_seed(0)
    with torch.device(device):
        experts: Any = GptOssExperts(config).to(dtype).requires_grad_(trained)
        size, width, top_k = config.hidden_size, config.intermediate_size, config.num_experts_per_tok
        for parameter in experts.parameters():
            nn.init.normal_(parameter, std=0.02)
        chosen = torch.rand(rows, experts.num_experts).topk(top_k).indices
        by_expert, order = chosen.flatten().sort(stable=True)
        ends = torch.bincount(by_expert, minlength=experts.num_experts).cumsum(0)
        made, outputs, x = (
            torch.randn(count, columns, dtype=dtype).requires_grad_()
            for count, columns in ((rows * top_k, 2 * width), (rows * top_k, size), (rows, size))
        )
        weights = torch.rand(rows, top_k, dtype=dtype).requires_grad_()
    find_gate_formulas([experts])
    of_visits = Visits.from_order(order, top_k)
    biases = [ExpertBiases(values, ends) for values in (experts.gate_up_proj_bias, experts.down_proj_bias)]
    learnt = [*experts.parameters()] if trained else []
    gate_leaves, sum_leaves = ([made, biases[0].values], [outputs, weights, biases[1].values])
    parts: dict[str, tuple[Callable[[], Tensor], list[Tensor], int]] = {
        # Forward reads 2 widths and writes one; backward reads three and writes two.
        "gate": (lambda: apply_gate(experts, made, biases[0]), gate_leaves, 8 * width * top_k),
        # Forward reads all outputs and writes a sum; backward reads both and writes all.
        "sum of visits": (
            lambda: sum_visits(outputs, weights, of_visits, biases[1]),
            sum_leaves,
            (3 * top_k + 2) * size,
        ),
        "all": (lambda: mix_experts(experts, x, chosen, weights), [x, weights, *learnt], 0),
    }
    for part, (compute, leaves, numbers) in parts.items():
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.no_grad():
            dout = torch.randn_like(compute())

        def run(compute: Any = compute, leaves: Any = leaves, dout: Tensor = dout) -> object:
            return torch.autograd.grad(compute(), leaves, dout)

        with without_kernels(experts):
            plain = time_run(run, flags)
        about = {"rows": rows, "trained": trained, "part": part, "bytes": numbers * rows * dout.element_size()}
        yield about | {"torch": plain, "kernels": time_run(run, flags)}


@contextmanager
def without_kernels(experts: nn.Module) -> Iterator[None]:
    """Gates as the class has them, and biases as rows; sums of visits have their kernel, as without biases."""

    def sum_after_biases(
        outputs: Tensor, weights: Tensor | None, of: Visits, biases: ExpertBiases | None = None
    ) -> Tensor:
        return visits.sum_visits(outputs if biases is None else biases.add_to(outputs), weights, of)

    with (
        patch.dict(vars(experts), {expert_products.GATE_FORMULA: None}),
        patch.object(expert_products, "sum_visits", sum_after_biases),
        patch.dict(globals(), {"sum_visits": sum_after_biases}),
    ):
        yield


def time_run(run: Callable[[], object], flags: argparse.Namespace) -> float:
    if not flags.small:
        return time_calls(run, flags.repeats)
    begin = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - begin)


def table_row(row: dict[str, Any]) -> list[str]:
    least = f"{1000 * row['bytes'] / BYTES_PER_SECOND:.3f}" if row["bytes"] else ""
    figures = f"{row['torch']:.3f}", f"{row['kernels']:.3f}", f"{row['torch'] / row['kernels']:.2f}", least
    return [f"{row['rows']:,}", "trained" if row["trained"] else "frozen", row["part"], *figures]


if __name__ == "__main__":
    main()
