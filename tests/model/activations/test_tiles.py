"""What layers keep, tiles of rows of MLPs and experts, segments of layers: the plain step's loss and gradients."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longspan.comm import World
from longspan.doctor.stock import compute_in_float64
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.activations.tiles import TiledForward, run_in_tiles
from longspan.plan import Group, MicroBatch, Plan, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import MtpLoss, run_step
from tests.model.activations.test_host_arena import bytes_in_use, find_host_arena
from tests.model.deep import deep
from tests.model.lora.adapted import adapted
from tests.model.mtp.dense import with_depths
from tests.model.stock import dense_answer, gradients_of, prepare_untried, texts, tiny, worst

LENGTHS = (13, 1, 24, 7, 2, 9)
EXACT = 1e-12
MODELS = {
    "tied embeddings": lambda: deep("qwen3", torch.float64),
    "norms after the MLP": lambda: tiny("gemma2", torch.float64, attention="eager"),
    "experts": lambda: deep("qwen3-moe", torch.float64),
    "an adapter": lambda: adapted("deep", "the first layer"),
    "a hybrid with a depth": lambda: with_depths("qwen3-next", 1),
}


def make_plan(home: Layout) -> Plan:
    if home.pp > 1 or home.slots != 2:
        return plan_fixed(LENGTHS, home, cp=1, max_tokens_per_slot=32, row_multiple=home.tp)
    batches = (  # slot 0 has no rows in the last one
        MicroBatch((Group((0, 1), (2, 1), (24, 1)), Group((1,), (0,), (13,)))),
        MicroBatch((Group((1, 0), (3,), (7,), "all_gather"), Group((1, 0), (5,), (9,), "a2a"))),
        MicroBatch((Group((1,), (4,), (2,)),)),
    )
    return Plan(2, LENGTHS, batches, targets=sum(LENGTHS) - len(LENGTHS)).check()


def take_step(model: nn.Module, plan: Plan, world: World) -> tuple[float, dict[str, Tensor]]:
    mtp: Any = {"mtp": MtpLoss(weight=0.7)} if hasattr(model, "mtp") and world.home.pp == 1 else {}
    result: Any = run_step(model, plan, texts(LENGTHS), world, **mtp)
    gradients = gradients_of(model)
    evaluated: Any = run_step(model, plan, texts(LENGTHS), world, backward=False)
    return result.loss + sum(result.mtp_losses or ()) + evaluated.loss, gradients


Case = tuple[str, Any, int, int]  # a model, what its layers keep, the layers of a segment, and rows of a tile
Row = tuple[Layout, Sequence[Case], dict[str, Any]]


def _errors(rank: int, rows: Sequence[Row], exact: dict[str, Any]) -> dict[str, float]:
    return {case: error for row in rows for case, error in _errors_in(*row, exact).items()}


def _errors_in(home: Layout, cases: Sequence[Case], options: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """`exact` is what the stock model says of the few, none for others, whose rows are tried."""
    errors, plan, plain = dict[str, float](), make_plan(home), {**exact}
    with World(home, backend=backend()) as world, compute_in_float64():
        for name, words, size, rows in cases:
            if name not in plain:
                plain[name] = take_step(prepare_untried(MODELS[name](), world, **options), plan, world)
            loss, gradients = plain[name]
            how: dict[str, Any] = {"checkpoint_policies": words, "segment_layers": size, "mlp_tile_tokens": rows}
            tried = home == TWO and not errors and not exact  # trials of rows take as long as two steps
            model = (prepare if tried else prepare_untried)(MODELS[name](), world, **how, **options)
            arena = find_host_arena(model)
            here, of_rank = take_step(model, plan, world)
            assert ("+host" in str(words)) == (arena is not None), (name, words)
            assert arena is None or (not bytes_in_use(arena) and (arena.bytes or home.pp > 1)), (name, words)
            errors[f"{name}, {words}, {size}, {rows}"] = max(abs(here / loss - 1), worst(of_rank, gradients))
    return errors


SPLIT, SEQUENCE_PARALLEL = {"pipeline_schedule": "zero_bubble", "virtual_stages": 2}, {"sequence_parallel": True}
TILES = [(name, word, 0, rows) for name in MODELS for word, rows in (("none", 3), ("selective", 5), ("full+host", 1))]
SEGMENTS = [
    (name, word, size, rows)
    for name in MODELS
    for word, size, rows in (("full", 2, 0), ("selective", 3, 5), ("selective+host", 8, 0))
]
MIXED = [("tied embeddings", ("full+host", "none", "selective", "full"), 4, 3)]
# Lists in which neighbours keep other things, which hold each word once, for four layers and for two.
OF_FOUR = (("none", "selective+host", "exchanged", "full+host"), ("full+host", "selective", "full", "selective+host"))
OF_TWO = (("full+host", "none"), ("selective", "selective+host"))
OF_DEPTH = tuple((*words, "selective+host") for words in OF_TWO)
LISTS = {"norms after the MLP": OF_TWO, "experts": OF_FOUR, "an adapter": OF_FOUR, "a hybrid with a depth": OF_DEPTH}
TWO, TP, EP, PP = Layout(ranks=2), Layout(ranks=2, tp=2), Layout(ranks=2, ep=2), Layout(ranks=2, pp=2)
FEW: list[Row] = [
    (
        TWO,
        [
            ("norms after the MLP", "full", 0, 3),
            # a list in a segment; the other list: LIST_OF_STAGES, segments of one word: "2 slots" of WHOLE
            ("tied embeddings", OF_FOUR[0], 4, 0),
        ],
        {},
    ),
    (EP, [("experts", "selective", 3, 5)], {}),
]
WHOLE: dict[str, Row] = {
    "2 slots": (TWO, [*TILES, *SEGMENTS], {}),
    "tp 2": (TP, [*TILES[:9], *SEGMENTS[:9]], {}),
    "tp 2, rows split": (TP, [("experts", "none", 0, 7)], SEQUENCE_PARALLEL),
    "split backward": (PP, [*TILES[:2], *TILES[6:8], *SEGMENTS[:2], *SEGMENTS[6:8]], SPLIT),
    "4 slots": (Layout(ranks=4, ep=2), [*TILES[6:9], *SEGMENTS[6:9]], {}),
    "lists": (TWO, [(name, words, 0, 0) for name, lists in LISTS.items() for words in lists], {}),
    "mixed": (TWO, MIXED, {"reshard_after_forward": False}),
}


LIST_OF_STAGES: Row = (PP, [("experts", OF_FOUR[1], 0, 0)], SPLIT)
OF_WHOLE = [pytest.param([row], marks=pytest.mark.whole, id=name) for name, row in WHOLE.items()]


@pytest.mark.parametrize(
    "rows", [pytest.param(FEW, id="few"), pytest.param([LIST_OF_STAGES], id="2 stages a rank"), *OF_WHOLE]
)
def test_tiles_and_segments_are_the_plain_step(rows: list[Row]) -> None:
    """The few are compared with the stock model, whose loss counts for the step's and for the evaluation's."""
    exact = dict[str, Any]()
    for name in {name for _, cases, _ in FEW for name, *_ in cases if rows is FEW}:
        with compute_in_float64():
            loss, gradients = dense_answer(MODELS[name](), texts(LENGTHS))
        exact[name] = 2 * loss, gradients
    for errors in run_ranks(_errors, len(rows[0][0].ranks), rows, exact):
        assert errors and max(errors.values()) < EXACT, {case: e for case, e in errors.items() if e >= EXACT}


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((8, 24), (24, 8)))
        self.dropout, self.rows = nn.Dropout(dropout), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[-2])
        return self.down(self.dropout(self.up(x).tanh()))


def _layer_gradients(mlp: Mlp, x: Tensor, *, recomputed: bool = False, normed: bool = False) -> list[Tensor]:
    """Of a residual around an MLP, in a checkpoint or not, perhaps with a product behind that saves its output."""

    def layer(x: Tensor) -> Tensor:
        out = mlp(x.sin())
        return x + (out.square() if normed else out)

    y: Any = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
    inputs = [z for z in (x, *mlp.parameters()) if z.requires_grad]
    return list(torch.autograd.grad((y * y.detach()).sum(), inputs))


def _tiled(mlp: Mlp, tile_rows: int) -> Mlp:
    tiled = copy.deepcopy(mlp)
    tiled.rows.clear()
    tiled.forward = TiledForward(tiled, tile_rows)
    return tiled


@pytest.mark.parametrize("tile_rows", [1, 3, 7, 22, 23])
@pytest.mark.parametrize("needed", ["rows", "no rows", "a frozen product"])
def test_any_tile_gives_the_gradients(tile_rows: int, needed: str) -> None:
    torch.manual_seed(0)
    mlp, x = Mlp(), torch.randn(1, 23, 8, dtype=torch.float64, requires_grad=needed != "no rows")
    mlp.up.requires_grad_(needed != "a frozen product")
    for recomputed in (False, True):
        expected = _layer_gradients(mlp, x, recomputed=recomputed)
        found = _layer_gradients(_tiled(mlp, tile_rows), x, recomputed=recomputed)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= EXACT * b.norm()


@pytest.mark.parametrize(("recomputed", "normed", "times"), [(False, False, 2), (True, False, 2), (True, True, 3)])
def test_no_third_run_but_where_something_follows(recomputed: bool, normed: bool, times: int) -> None:
    mlp, x = _tiled(Mlp(), 8), torch.randn(1, 23, 8, dtype=torch.float64, requires_grad=True)
    _layer_gradients(mlp, x, recomputed=recomputed, normed=normed)
    assert mlp.rows == [8, 8, 7] * times


def test_dropout_drops_the_same_again() -> None:
    torch.manual_seed(0)
    mlp, x = _tiled(Mlp(dropout=0.5), 4), torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    tiles = [type(mlp).forward(mlp, part) for part in x.tensor_split(3)]
    expected = torch.autograd.grad(torch.cat(tiles).square().sum(), [x, *mlp.parameters()])
    drawn = torch.rand(1)
    torch.manual_seed(1)
    found = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
    assert torch.equal(torch.rand(1), drawn)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= EXACT * b.norm()


def test_parameters_are_summed_in_float32() -> None:
    torch.manual_seed(0)
    weight = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(1024, 1, dtype=torch.bfloat16)
    module = nn.ParameterList([weight])
    run_in_tiles(lambda rows: rows @ module[0], (x,), module, 1024).backward(torch.ones_like(x))
    weight = module[0]
    assert weight.grad is not None and weight.grad.item() == 1024  # 256 if each sum were rounded to bfloat16


def test_a_graph_that_is_kept_and_autocast() -> None:
    torch.manual_seed(0)
    mlp, x = Mlp().float(), torch.randn(10, 8, requires_grad=True)
    tiled = _tiled(mlp, 4)
    with torch.autocast("cpu", torch.bfloat16):
        whole, out = mlp(x), tiled(x)
    assert out.dtype == whole.dtype == torch.bfloat16
    for _ in range(2):
        expected = torch.autograd.grad(whole.float().square().sum(), [x, *mlp.parameters()], retain_graph=True)
        found = torch.autograd.grad(out.float().square().sum(), [x, *tiled.parameters()], retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= 2e-2 * b.norm()
