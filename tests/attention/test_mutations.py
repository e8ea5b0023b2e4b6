"""The parity table would tell: with one term of the source changed, some case of it is wrong.

Every rank changes the same line, runs cases until one is wrong, and puts the line back.
"""

import pytest

from longspan import Layout, World
from longspan.attention import all_to_all, ring
from longspan.testing import backend, run_ranks
from tests.attention.cases import LIMIT, WAYS, Question, Way, cases_of, worst_errors
from tests.attention.test_attend import needs
from tests.mutation import mutated

CASES = cases_of(
    (
        Question("ragged", "mla", window=5, sinks=True),
        Question("several groups a slot", "gqa", sinks=True),
        Question("ragged", "mla", dropout=0.3, softcap=1.5, sinks=True, spans=9),
        Question("padded", "mqa", causal=False, scale=-0.4, spans=4),
        Question("ragged", "mha", window=30, softcap=2.0),
        Question("many documents", "gqa", window=19),
        Question("many documents", "gqa", window=3, spans=8),
        Question("shares without rows", "64/8 of 64"),  # members with two key/value heads, each of several slices
    ),
    WAYS,
) + cases_of(
    [Question("ragged", "mla", dropout=0.3, sinks=True), Question("halves", "64/8 of 64", sinks=True)],
    [Way(kind, recomputed=True) for kind in ("a2a", "a2a+p2p")],
)

MUTATIONS = [
    # merging blocks
    ("attention.rows", "step = torch.sigmoid(lse - rows_lse)", "step = torch.full_like(lse, 0.5)"),
    ("attention.rows", "rows_lse = torch.logaddexp(rows_lse, lse)", "rows_lse = torch.maximum(rows_lse, lse)"),
    # sums of gradients over blocks, of queries and of keys and values
    ("attention.rows", "into += source", "into.copy_(source)"),
    ("attention.rows", "into.index_add_(0, index,", "into.index_copy_(0, index,"),
    ("attention.rows", "add_rows([(x, self._full_sum())], rows)", "self._full_sum()"),
    # one ring step
    (
        "attention.ring",
        "yield members.launches(owner), block_k",
        "yield members.launches(owner) if owner else (), block_k",
    ),
    (
        "attention.ring",
        "self._members.launches(owner), list",
        "self._members.launches(owner) if owner else (), list",
    ),
    (
        "attention.ring",
        "members.launches(members.member)",
        "members.launches(members.member) if members.member else ()",
    ),
    (
        "attention.rows",
        "add_rows([(x, self._full_sum()[:, heads])], slice(0, self._shape[0]))",
        "self._full_sum()[:, heads] = x",
    ),
    # sums of dK and dV
    (
        "attention.rows",
        "add_rows(list(zip(gradients, total, strict=True)), rows)",
        "add_rows([(gradients[0], total[0])], rows)",
    ),
    ("attention.rows", "if fresh and len(addends) == 1", "if len(addends) == 1"),
    ("attention.ring", "total.index_add_(0, rows, arrived)", "total.index_copy_(0, rows, arrived)"),
    ("attention.rows", "total.index_add_(0, rows,", "total.index_copy_(0, rows,"),
    ("attention.all_gather", "(self._members.degree, -1)).sum(0)", "(self._members.degree, -1))[0]"),
    ("attention.all_to_all", ".sum(2) for x", "[:, :, 0] for x"),
    ("attention.all_to_all", "sum_addends(self._kv_addends, ", "sum_addends(self._kv_addends[:1], "),
    # slices around a ring: those that share keys and values, and their own block, early and late
    ("attention.ring", "of_own) for of_own in own]", "of_own) for of_own in own[:1]]"),
    ("attention.ring", "for dout, saved, call, dq in queries:", "for dout, saved, call, dq in queries[:1]:"),
    (
        "attention.all_to_all",
        "own_pairs += [ring.own_gradients(later_queries) for later_queries in queries[len(early) :]]",
        "pass",
    ),
    # rows and heads where they belong
    ("attention.all_gather", "(started.pop().wait(),), order)", "(started.pop().wait(),), order.flip(0))"),
    ("attention.all_to_all", "None if orders is None else orders[1]", "None"),
    ("attention.all_to_all", "arrived if orders is None else join_columns((arrived,), orders[0])", "arrived"),
    (
        "attention.ring",
        "index_copy_(0, window_rows.received_places, handle",
        "index_copy_(0, window_rows.received_places.flip(0), handle",
    ),
    ("attention.all_to_all", "start = self.own_heads.start + slice_index", "start = slice_index"),
    ("attention.all_to_all", "slice_index * cuts // self.slices)", "slice_index * (cuts == self.slices))"),
    (
        "attention.all_to_all",
        "all_heads[self._swap.own_heads] = torch.cat(dsinks)",
        "all_heads[: sum(map(len, dsinks))] = torch.cat(dsinks)",
    ),
    # what a recomputed layer exchanges once more
    ("attention.attend", "part_out, x.lse) for x in slices]", "part_out, slices[0].lse) for x in slices]"),
    (
        "attention.all_to_all",
        "self._shared_kv = tuple(kv) or self._shared_kv",
        "self._shared_kv = self._shared_kv or tuple(kv)",
    ),
    (
        "attention.all_to_all",
        "heads_as_numbers(out) if self._takes_deltas",
        "0 * heads_as_numbers(out) if self._takes_deltas",
    ),
    (
        "attention.all_to_all",
        "self._takes_deltas else out, self._saved",
        "self._takes_deltas else 0 * out, self._saved",
    ),
    ("attention.rows", "wide[..., 0] = numbers", "wide[..., -1] = numbers"),
    # sinks
    (
        "attention.rows",
        "out.mul_(torch.exp(lse - lse_with_sinks).unsqueeze(-1)), lse_with_sinks",
        "out, lse_with_sinks",
    ),
    ("attention.call", "self.sinks[start:stop]", "self.sinks[: stop - start]"),
    ("attention.call", "return -weight.mul_(", "return weight.mul_("),
    ("attention.attend", "dsinks += part", "dsinks = part"),
    # the sign of the scale
    ("attention.attend", "sign=(scale > 0) - (scale < 0)", "sign=1"),
    # edges of masks
    ("attention.tiles", "left=window - 1 - ahead", "left=window - ahead"),
    (
        "attention.tiles",
        "tiles.left < tiles.k_stop - tiles.k_start - 1",
        "tiles.left < (tiles.k_stop - tiles.k_start) // 2",
    ),
    ("attention.tiles", "limited.k_stop - limited.left - 1", "limited.k_stop - limited.left"),
    ("attention.tiles", "k_stop=first_key, left=np.zeros_like", "k_stop=first_key, left=np.ones_like"),
    ("attention.tiles", "k_stop + window - 1", "k_stop + window - 2"),
    ("attention.tiles", "np.array([0, -1])", "np.array([-1, -1])"),
    (
        "attention.call",
        "segments.stop, np.asarray(group.lengths)[segments.document]",
        "segments.stop, np.asarray(group.laid_out)[segments.document]",
    ),
    # dropout and softcap
    ("attention.call", "self.first_head, self.first_head + heads", "0, heads"),
    ("attention.call", "document[rows]), q_position[rows]", "document[rows]), 0 * q_position[rows]"),
    ("attention.call", "lambda: segments.positions", "lambda: 0 * segments.positions"),
    ("attention.kernels.reference", "dscores *= slope", "pass"),
    ("attention.kernels.reference", "dscores.sub_(delta.unsqueeze(-1)).mul_", "dscores.mul_"),
    ("attention.kernels.reference", "weights if factors is None else weights * factors", "weights"),
    ("attention.kernels.reference", "dscores *= factors", "pass"),
    # kernels
    ("attention.tiles", "if tile.keys > tile.queries:", "if False:"),
    ("attention.kernels.cpu_flash", "total[rows] += x[0].transpose(0, 1)", "total[rows] = x[0].transpose(0, 1)"),
    # spans: none, on local rows alone, without those that come through a narrow window, in full attention; their edge
    ("attention.call", "+ span_tiles(queries, keys, self.spans)", ""),
    (
        "attention.call",
        "span_tiles(queries, keys, self.spans)",
        "(span_tiles(queries, keys, self.spans) if [*queries.start] == [*keys.start] else ())",
    ),
    ("attention.call", "self.spans.run_ends(runs)", "runs.stop"),
    ("attention.call", "spans if mask.causal else NO_SPANS", "spans"),
    ("attention.tiles", "left = k_stop - 1 - stop", "left = k_stop - stop"),
]


def survivors(rank: int, slots: int) -> list[str]:
    """Mutations that no case notices, and cases that are wrong without one."""
    ring.HALVES_BYTES = all_to_all.SLICE_BYTES = 0  # in this process only: tensors are taken for large
    all_to_all.SLICES = 4  # some of one key/value head, some of several
    with World(Layout(ranks=slots), backend=backend()) as world:
        errors = worst_errors(CASES, slots, world)
        wrong = [str(case) for case, error in zip(CASES, errors, strict=True) if not error <= LIMIT["float64"]]
        for name, old, new in MUTATIONS:
            with mutated((name, old, new)):
                if not any(not worst_errors([case], slots, world)[0] <= LIMIT["float64"] for case in CASES):
                    wrong.append(f"{name}: {old} -> {new}")
    return wrong


@pytest.mark.whole
def test_every_dropped_term_is_noticed() -> None:
    needs(4)
    for left in run_ranks(survivors, 4, 4):
        assert not left, "\n".join(left)
