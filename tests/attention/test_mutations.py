"""The parity table would tell: with one term of the source changed, some case of it is wrong.

Every rank changes the same line, runs cases until one is wrong, and puts the line back.
"""

import pytest

from longspan import Layout, World
from longspan.attention import all_to_all, ring
from longspan.testing import backend, run_ranks
from tests.attention.cases import WAYS, Question, Way, cases_of, errors_over_limits
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
        Question("many documents", "gqa", window=3, spans=8, span_mask="whole"),
        Question("many documents", "gqa", window=3, spans=8, span_mask="none"),
        Question("ragged", "mla", indices=7, sinks=True),
        Question("ragged", "latents", indices=7, sinks=True),
        Question("several groups a slot", "gqa", indices=2, block_size=5, by_head=True, sinks=True),
        Question("fewer rows than members", "GQA, 48/8"),  # members with two key/value heads, each of several slices
    ),
    WAYS,
) + cases_of(
    [Question("ragged", "mla", dropout=0.3, sinks=True), Question("halves", "GQA, 48/8", sinks=True)],
    [Way(kind, recomputed=True) for kind in ("a2a", "a2a+p2p")],
)

OF_MODULES = {  # what stands in a module of attention once, and what takes its place
    "rows": {  # merging blocks, and adding rows
        "step = torch.sigmoid(lse - rows_lse)": "step = torch.full_like(lse, 0.5)",
        "rows_lse = torch.logaddexp(rows_lse, lse)": "rows_lse = torch.maximum(rows_lse, lse)",
        "into += source": "into.copy_(source)",
        "into.index_add_(0, index,": "into.index_copy_(0, index,",
        "add_rows(list(zip(gradients, total, strict=True)), rows)": "add_rows([(gradients[0], total[0])], rows)",
        "if fresh and len(addends) == 1": "if len(addends) == 1",
        "total.index_add_(0, rows,": "total.index_copy_(0, rows,",
    },
    "ring": {  # one ring step; slices that share keys and values, and their own block, early and late
        "yield members.launches(owner), block_k": "yield members.launches(owner) if owner else (), block_k",
        "launches = self._members.launches(owner)": "launches = self._members.launches(owner) if owner else ()",
        "members.launches(members.member)": "members.launches(members.member) if members.member else ()",
        "total.index_add_(0, rows, arrived)": "total.index_copy_(0, rows, arrived)",
        "pair) for pair in own_pairs]": "pair) for pair in own_pairs[:1]]",
        "for dout, saved, call, dq in queries:": "for dout, saved, call, dq in queries[:1]:",
        "(0, window_rows.received_places, handle": "(0, window_rows.received_places.flip(0), handle",
    },
    "all_gather": {
        "(members.degree, -1)).sum(0)": "(members.degree, -1))[0]",
        "(started.pop().wait(),), order)": "(started.pop().wait(),), order.flip(0))",
    },
    "all_to_all": {  # rows and heads where they belong, and what a recomputed layer exchanges once more
        ".sum(2) for x": "[:, :, 0] for x",
        "wide[..., 0] = numbers": "wide[..., -1] = numbers",
        "sum_addends(self._kv_addends, ": "sum_addends(self._kv_addends[:1], ",
        "own_pairs += [ring.own_block_gradients(later_queries) for later_queries in queries[len(early) :]]": "pass",
        "None if orders is None else orders[1]": "None",
        "arrived if orders is None else join_columns((arrived,), orders[0])": "arrived",
        "arrived if orders is None else arrived[orders[0]]": "arrived",
        "arrived.repeat_interleave(split.kv_copies, 1)": "arrived.repeat(1, split.kv_copies, 1)",
        "start = self.own_heads.start + slice_index": "start = slice_index",
        "slice_index * cuts // self.slices)": "slice_index * (cuts == self.slices))",
        "all_heads[self._swap.own_heads] = torch.cat(dsinks)": "all_heads[: sum(map(len, dsinks))] = torch.cat(dsinks)",
        "self._shared_kv = tuple(kv) or self._shared_kv": "self._shared_kv = self._shared_kv or tuple(kv)",
        "unpack_numbers(out) if self._takes_deltas": "0 * unpack_numbers(out) if self._takes_deltas",
        "self._takes_deltas else out, lse": "self._takes_deltas else 0 * out, lse",
    },
    "attend": {
        "part_out, x.lse) for x in slices]": "part_out, slices[0].lse) for x in slices]",
        "dsinks += part": "dsinks = part",
        "sign=(scale > 0) - (scale < 0)": "sign=1",
    },
    "call": {
        "self.sinks[start:stop]": "self.sinks[: stop - start]",
        "indices[:, start // group : -(-stop // group)]": "indices[:, : -(-stop // group) - start // group]",
    },
    "blocks": {  # sums of gradients over blocks, and what a sink takes
        "add_rows([(x, self._full_sum())], rows)": "self._full_sum()",
        "add_rows([(x, self._full_sum()[:, heads])], all_rows)": "self._full_sum()[:, heads] = x",
        "out.mul_(torch.exp(lse - lse_with_sinks).unsqueeze(-1)), lse_with_sinks": "out, lse_with_sinks",
        "return -weight.mul_(": "return weight.mul_(",
    },
    "dropout": {
        "self.first_head, self.first_head + heads": "0, heads",
        "document[rows]), q_position[rows]": "document[rows]), 0 * q_position[rows]",
    },
    "members": {  # padding; spans: on local rows alone, without those of a narrow window, in full attention
        "stop, np.asarray(group.lengths)[segments": "stop, np.asarray(group.laid_out)[segments",
        "lambda: segments.positions": "lambda: 0 * segments.positions",
        "tilings += span_tiles(queries, keys, self.spans, before)": "pass",
        "span_tiles(queries, keys, self.spans, before)": "(span_tiles(queries, keys, self.spans, before)"
        " if [*queries.start] == [*keys.start] else ())",
        "self.spans, before)": "self.spans)",
        "self.spans.run_starts(runs)": "start",
        "self.spans.run_ends(runs)": "runs.stop",
        'mask.causal and mask.spans != "none"': 'mask.spans != "none"',
        ' and mask.spans != "none"': "",
    },
    "masks": {  # edges of masks and of spans
        "left=window - 1 - after_key": "left=window - after_key",
        "tiles.left < tiles.k_stop - tiles.k_start - 1": "tiles.left < (tiles.k_stop - tiles.k_start) // 2",
        "limited.k_stop - limited.left - 1": "limited.k_stop - limited.left",
        "k_stop=first_key, left=np.zeros_like": "k_stop=first_key, left=np.ones_like",
        "k_stop + window - 1": "k_stop + window - 2",
        "np.array([0, -1])": "np.array([-1, -1])",
        "left = k_stop - 1 - stop": "left = k_stop - stop",
        "right = stop - before - k_stop": "right = stop - before - k_stop + 1",
    },
    "tiles": {"if tile.keys > tile.queries:": "if False:"},
    "kernels.reference": {  # dropout and softcap
        "dscores *= slope": "pass",
        "dscores.sub_(delta.unsqueeze(-1)).mul_": "dscores.mul_",
        "weights if factors is None else weights * factors": "weights",
        "dscores *= factors": "pass",
        "_chosen_key_mask(tile, launch, call)": "None",
        "chosen[..., blocks + 1]": "chosen[..., blocks]",
        "// call.block_size": "",
        "clamp_(min=NO_KEY)": "clone()",
        "dv += value_share": "pass",
    },
    "kernels.cpu_flash": {"total[rows] += x[0].transpose(0, 1)": "total[rows] = x[0].transpose(0, 1)"},
}
MUTATIONS = [(f"attention.{m}", old, new) for m, changes in OF_MODULES.items() for old, new in changes.items()]


def survivors(rank: int, slots: int) -> list[str]:
    ring.HALVES_BYTES = all_to_all.SLICE_BYTES = 0  # in this process only: tensors are taken for large
    all_to_all.SLICES = 4  # some of one key/value head, some of several
    with World(Layout(ranks=slots), backend=backend()) as world:
        wrong = [str(c) for c, e in zip(CASES, errors_over_limits(CASES, slots, world), strict=True) if not e <= 1]
        for name, old, new in MUTATIONS:
            with mutated((name, old, new)):
                if not any(not errors_over_limits([case], slots, world)[0] <= 1 for case in CASES):
                    wrong.append(f"{name}: {old} -> {new}")
    return wrong


@pytest.mark.whole
def test_every_dropped_term_is_noticed() -> None:
    needs(4)
    for left in run_ranks(survivors, 4, 4):
        assert not left, "\n".join(left)
