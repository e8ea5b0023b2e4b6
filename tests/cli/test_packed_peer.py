"""The peer of packed documents: each document whole on one rank, attention within documents, layers recomputed."""

import json
from typing import Any

import pytest
import torch
from bench.training.packed_peer import (
    _ATTENTION,
    CompiledLayers,
    PackedBatch,
    _attend_by_sdpa,
    _register_attention,
    pack_on_ranks,
)
from bench.training.step_peers import peer_cases
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from longspan.bench.step.command import main
from longspan.data.document import synthetic_documents
from longspan.layout.partition import NO_TARGET
from longspan.model.presets import preset_config
from tests.reference import relative_error


@pytest.mark.whole
def test_one_sequence_has_both_peers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sequences", "40,24", "--planners", "fixed", "--repeats", "1", "--warmup", "0", "--json"]
    assert main(["--world", "1", *words], peer_cases) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    names, reasons = [row["name"] for row in rows], [row["missing"] for row in rows if "missing" in row]
    assert [name.split(" + ")[-1].split(" ")[0] for name in names[2:]] == ["torch", "compiled"] * 2
    assert len(reasons) == 2 and all("its attention kernels run on CUDA only" in reason for reason in reasons)
    for ours, packed in zip(rows[:2], rows[3::2], strict=True):
        assert packed["loss"] == pytest.approx(ours["loss"], rel=1e-6)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 5), st.sampled_from([0, 50, 64]))
def test_every_document_is_whole_in_one_micro_batch(lengths: list[int], ranks: int, max_rows: int) -> None:
    if len(lengths) < ranks:
        with pytest.raises(ValueError, match=f"it cuts no document, and {len(lengths)} do not reach {ranks} ranks"):
            pack_on_ranks(lengths, ranks, max_rows)
        return
    packed = pack_on_ranks(lengths, ranks, max_rows)
    assert sorted(i for of_rank in packed for batch in of_rank for i in batch) == list(range(len(lengths)))
    assert len(packed) == ranks and len({len(of_rank) for of_rank in packed}) == 1
    assert not max_rows or all(sum(lengths[i] for i in batch) <= max_rows for of_rank in packed for batch in of_rank)


def test_a_document_longer_than_a_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="one of 65 rows is more than 64 a slot"):
        pack_on_ranks([65, 1], 2, 64)


def test_labels_name_the_next_token_of_a_document() -> None:
    documents = synthetic_documents([3, 1, 2], 64)
    batch = PackedBatch.of(documents, torch.device("cpu"))
    ids = batch.ids[0].tolist()
    assert batch.labels.tolist() == [[ids[1], ids[2], NO_TARGET, NO_TARGET, ids[5], NO_TARGET]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0, 1]] and batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.longest == 3 and PackedBatch.of([], torch.device("cpu")).labels.tolist() == [[NO_TARGET]]


def test_attention_is_causal_within_documents() -> None:
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, heads, 8, generator=draws, dtype=torch.float64) for heads in (4, 2, 2))
    document = torch.tensor([0] * 7 + [1] * 5)
    allowed = (document[:, None] == document) & torch.ones(12, 12).tril().bool()
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    dense = F.scaled_dot_product_attention(*heads_first, attn_mask=allowed, scale=0.3, enable_gqa=True)
    out = _attend_by_sdpa(q, k, v, torch.tensor([0, 7, 12]), 7, 0.3)
    assert relative_error(out, dense[0].transpose(0, 1)) < 1e-14


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile, which looks at a layer's input
def test_recomputed_layers_have_the_same_gradients() -> None:
    """Layers that are recomputed attend twice, the others once."""
    gradients, runs = list[Any](), list[int]()

    def attend(*arguments: Any) -> Tensor:
        runs.append(layers.recomputed)
        return _attend_by_sdpa(*arguments)

    _register_attention(attend)
    batch = PackedBatch.of(synthetic_documents([5, 3], 64), torch.device("cpu"))
    for recomputed in (0, 1, 2):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(preset_config("qwen3-tiny", vocab_size=64))
        model.set_attn_implementation(_ATTENTION)
        layers = CompiledLayers(model, "eager")
        layers.recomputed = recomputed
        model(**batch.model_arguments()).logits.float().square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert runs == [0] * 2 + [1] * 3 + [2] * 4
    assert all(map(torch.equal, gradients[0], gradients[1])) and all(map(torch.equal, gradients[0], gradients[2]))
