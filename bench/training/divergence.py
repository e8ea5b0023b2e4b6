"""Milliseconds and memory of a distillation's loss on one GPU, beside cross entropy and TRL's chunked divergence.

    python bench/training/divergence.py --out bench/records/divergence-H200.json   # about a minute

Forward and backward from hidden rows of student and teacher to the gradients of the student's rows and head, in
bfloat16. Bytes are the peak above what is there before. With trl 1.16 installed, its `ChunkedDivergenceFunction` gets
the same rows and heads, and its loss and gradients are compared with ours.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import missing_row, open_record, write_page
from bench.training.float8_layer import time_calls
from torch import Tensor, nn

from longspan.plain_text import markdown_table
from longspan.train.divergence import Divergence
from longspan.train.loss import Targets, chunked_loss, cross_entropy, rows_of_two_heads

DEVICE = torch.device("cuda")
Gradients = tuple[Tensor, Tensor, Tensor]  # loss, and gradients of hidden rows and of the head


class Plain(NamedTuple):
    """A head of one linear."""

    linear: nn.Linear
    makes_scores: bool = False

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.linear.weight,)

    @property
    def vocabulary(self) -> int:
        return self.linear.out_features

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)


class Rows(NamedTuple):
    """Last hidden rows of both models, their heads, and the student's targets."""

    student: Tensor
    teacher: Tensor
    head: Plain
    teacher_head: Plain
    targets: Targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--sizes", type=int, nargs=2, default=[2560, 4096], help="of the student and the teacher")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--betas", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--top_k", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    record = open_record("divergence", None, "nccl", Path(__file__).parent)
    record["rows"] = [row for count in flags.rows for row in measure_rows(count, flags)]
    cells = list[list[str]]()
    for r in record["rows"]:
        figures = [f"{r['ms']:.1f}", f"{r['gib']:.2f}"] if "ms" in r else [r["missing"], ""]
        cells.append([f"{r['rows']:,}", r["loss"], r["by"], *figures])
    write_page(record, flags.out, "A loss of distributions", markdown_table(["rows", "loss", "", "ms", "GiB"], cells))


def measure_rows(count: int, flags: argparse.Namespace) -> list[dict[str, Any]]:
    rows, results = draw_rows(count, flags), list[dict[str, Any]]()

    def measure(loss: str, by: str, compute: Callable[[], Gradients]) -> Gradients | None:
        row: dict[str, Any] = {"rows": count, "loss": loss, "by": by}
        results.append(row)
        try:
            made = compute()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            compute()
            row["gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
            row["ms"] = time_calls(compute, flags.repeats)
        except Exception as error:
            row |= missing_row(error)
            return None
        print(row, flush=True)
        return made

    measure("cross entropy", "longspan", lambda: differentiate(rows, cross_entropy, 0))
    for beta in flags.betas:
        name = f"beta {beta:g}"
        ours = measure(name, "longspan", lambda beta=beta: distil(rows, Divergence(beta)))
        theirs = measure(name, "trl", lambda beta=beta: distil_by_trl(rows, beta))
        if ours and theirs:
            pairs = zip(ours, theirs, strict=True)
            results[-1]["differences"] = [float((a - b).double().norm() / b.double().norm()) for a, b in pairs]
            print(results[-1]["differences"], flush=True)
        del ours, theirs
    of_few = Divergence(0.0, top_k=flags.top_k)
    measure(f"the {flags.top_k} likeliest", "longspan", lambda: distil(rows, of_few))
    measure(f"the {flags.top_k} likeliest, kept", "longspan", lambda: distil_from_kept(rows, of_few))
    return results


def draw_rows(count: int, flags: argparse.Namespace) -> Rows:
    torch.manual_seed(0)
    made = {"device": DEVICE, "dtype": torch.bfloat16}
    student, teacher = (torch.randn(count, size, **made) for size in flags.sizes)
    heads = [nn.Linear(size, flags.vocabulary, bias=False, **made) for size in flags.sizes]
    for head, size in zip(heads, flags.sizes, strict=True):
        nn.init.normal_(head.weight, std=3 * size**-0.5)
    ids = torch.randint(flags.vocabulary, (count,), device=DEVICE)
    targets = Targets(torch.arange(count, device=DEVICE), ids)
    return Rows(student.requires_grad_(), teacher, *map(Plain, heads), targets)


def differentiate(rows: Rows, losses: Callable[..., Any], chunk_rows: int) -> Gradients:
    loss = chunked_loss(rows.student, rows.targets, losses, rows.head, chunk_rows)
    return loss.detach(), *torch.autograd.grad(loss, (rows.student, rows.head.linear.weight))


def distil(rows: Rows, divergence: Divergence) -> Gradients:
    """As `DistillationPasses` does."""

    def losses(log_probs: Tensor, part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            found = divergence.compare_rows(logits, rows.teacher_head(rows.teacher[part]), torch.ones_like(log_probs))
        assert found.gradient is not None
        return found.losses.sum(dtype=torch.float64), found.gradient

    return differentiate(rows, losses, rows_of_two_heads(*[rows.head.vocabulary] * 2, rows.student))


def distil_from_kept(rows: Rows, divergence: Divergence) -> Gradients:
    """The table is the same for all chunks: any of as many rows."""
    vocabulary = rows.head.vocabulary
    with torch.no_grad():
        table = divergence.find_likeliest(rows.teacher_head(rows.teacher[:4096]))

    def losses(log_probs: Tensor, part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        few = type(table)(*(x[: len(logits)] for x in table))
        found = divergence.compare_likeliest(logits, few, vocabulary, torch.ones_like(log_probs))
        assert found.gradient is not None
        return found.losses.sum(dtype=torch.float64), found.gradient

    return differentiate(rows, losses, rows_of_two_heads(vocabulary, 0, rows.student))


def distil_by_trl(rows: Rows, beta: float) -> Gradients:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    function: Any = ChunkedDivergenceFunction
    weights = rows.head.linear.weight, rows.teacher_head.linear.weight
    divergence, _ = function.apply(rows.student, weights[0], None, rows.teacher, weights[1], None, beta, 1.0)
    loss = divergence.sum(dtype=torch.float64)
    return loss.detach(), *torch.autograd.grad(loss, (rows.student, weights[0]))


if __name__ == "__main__":
    main()
