"""Saved folders: what they replace, back into a prepared model, and whole weights by name under every home."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from longspan import Layout, World, load_model, save_model, weights_by_name
from longspan.errors import ModelError
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.saving.stock_folders import load_weights
from longspan.model.weights.write import MODEL_PATTERN, make_partial_folder, replace_files
from longspan.testing import backend, run_ranks
from tests.model.deep import deep
from tests.model.lora.adapted import adapted, base_model
from tests.model.stock import error, prepare_untried, tiny

OTHERS = {"README.md": "mine", "chat_template.jinja": "mine", "model-notes.txt": "mine", "step-1/config.json": "{}"}
OTHERS |= {"checkpoint-4/model.safetensors": "a trainer's", "training_args.bin": "mine"}
OLD = {"config.json": "{}", "model.safetensors.index.json": "{}", "generation_config.json": "{}"}
OLD |= {f"model-0000{i}-of-00002.safetensors": "old" for i in (1, 2)}
ADAPTER = {"adapter_config.json": "{}", "adapter_model.safetensors": "old"}
NEW = {"config.json", "generation_config.json", "model.safetensors"}


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(Layout(1), backend="gloo") as opened:
        yield opened


def model_on(world: World, *, rank: int = 0) -> Any:
    model: Any = load_model(preset="qwen3-tiny", vocab_size=300)
    return prepare_untried(add_lora(model, NewAdapter(rank=rank)) if rank else model, world)


def test_a_model_replaces_an_older_one_and_nothing_else(tmp_path: Path, world: World) -> None:
    folder, model = write_files(tmp_path / "model", OTHERS | OLD | ADAPTER), model_on(world)
    save_model(model, folder, world)
    assert files_of(folder) == {*OTHERS, *NEW} and [path.name for path in tmp_path.iterdir()] == ["model"]
    assert all((folder / name).read_text() == text for name, text in OTHERS.items())
    stock = AutoModelForCausalLM.from_pretrained(folder)
    assert stock.config._attn_implementation == "sdpa" and stock.config.use_cache
    assert [type(stock).__name__] == stock.config.architectures == ["Qwen3ForCausalLM"]
    assert stock.get_output_embeddings().weight is stock.get_input_embeddings().weight
    assert all(p.equal(model.get_parameter(name).full_tensor()) for name, p in stock.named_parameters())


def test_a_tokenizer_replaces_all_of_an_older_one(tmp_path: Path, world: World) -> None:
    folder = write_files(tmp_path / "model", {"README.md": "mine", "vocab.json": "{}", "chat_template.jinja": "old"})
    save_model(model_on(world), folder, world, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())))
    assert files_of(folder) == {"README.md", *NEW, "tokenizer.json", "tokenizer_config.json"}


def test_an_adapter_leaves_the_model_beside_it(tmp_path: Path, world: World) -> None:
    pytest.importorskip("peft")
    folder = write_files(tmp_path / "model", OTHERS | OLD | ADAPTER | {"adapter_model.bin": "old"})
    save_model(model_on(world, rank=2), folder, world)
    assert files_of(folder) == {*OTHERS, *OLD, *ADAPTER}
    assert (folder / "adapter_model.safetensors").stat().st_size > 100
    assert (folder / "model-00001-of-00002.safetensors").read_text() == "old"


def test_a_copy_that_is_trained_at_both_ends_is_written_for_each(tmp_path: Path, world: World) -> None:
    base = load_model(preset="qwen3-tiny", vocab_size=64)
    ends = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    model: Any = prepare_untried(get_peft_model(base, ends), world)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding.add_(1.0)
    expected = embedding.full_tensor().clone()
    save_model(model, tmp_path, world)
    read: Any = peft.PeftModel.from_pretrained(load_model(preset="qwen3-tiny", vocab_size=64), str(tmp_path))
    for module in (read.get_input_embeddings(), read.get_output_embeddings()):
        assert torch.equal(module.weight, expected)
    with torch.no_grad():
        embedding.zero_()
    load_weights(model, tmp_path, world)
    assert torch.equal(embedding.full_tensor(), expected)


def test_a_file_is_not_replaced_and_a_link_is_followed(tmp_path: Path, world: World) -> None:
    (tmp_path / "weights.pt").write_text("mine")
    with pytest.raises(ModelError, match=r"weights.pt is a file; name a folder to write the model to"):
        save_model(model_on(world), tmp_path / "weights.pt", world)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    download = write_files(tmp_path / "elsewhere.partial", {"notes": "mine"})  # as other tools call theirs
    save_model(model_on(world), tmp_path / "link", world)
    assert (download / "notes").read_text() == "mine"
    assert (tmp_path / "link").is_symlink() and files_of(tmp_path / "elsewhere") == NEW
    assert (tmp_path / "weights.pt").read_text() == "mine"


@pytest.mark.parametrize("stop", range(12))
def test_nothing_is_lost_or_mixed_where_a_save_is_interrupted(
    tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file is the last to move, a folder with a configuration holds one model's files alone."""
    folder = write_files(tmp_path / "model", OTHERS | OLD)
    write_files(tmp_path / "model.old", {"notes": "mine"})
    new = dict.fromkeys([*OLD, "model.safetensors"], "new")
    partial, moves, rename = write_files(make_partial_folder(folder), new), iter(range(99)), Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if next(moves) == stop:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    try:
        replace_files(partial, folder, MODEL_PATTERN)
        assert next(moves) <= stop
    except KeyboardInterrupt:
        pass
    of_models = [(folder / name).read_text() == "new" for name in {*OLD, *new} if (folder / name).is_file()]
    assert (
        not (folder / "config.json").is_file() or all(of_models) or (not any(of_models) and len(of_models) == len(OLD))
    )
    everywhere = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert everywhere.count("new") == len(new)
    assert all(of_models) or len(everywhere) == len(OTHERS) + len(OLD) + len(new) + 1
    assert (tmp_path / "model.old" / "notes").read_text() == "mine"


LAYOUTS: list[tuple[str, Layout, bool, Layout]] = [  # a model, the home that saves, sharded, and the one that loads
    ("qwen3-tiny", Layout((1, 0), dp_replicate=2), True, Layout(2, tp=2)),  # tied embeddings
    ("llama", Layout(2, tp=2), False, Layout((1, 0))),  # two ends
    ("qwen3-moe-tiny", Layout(2, ep=2), True, Layout(2)),  # experts that a folder has one by one
]


def model_of(preset: str, seed: int, lora: bool = False) -> Any:
    if preset == "llama":
        return tiny("llama", seed=seed)
    model = load_model(None, preset, dtype="float32", seed=seed, vocab_size=64)
    if lora:
        torch.manual_seed(seed)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    return model


def whole(model: Any) -> dict[str, Tensor]:
    return {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in model.state_dict().items()}


def reload_rank(rank: int, folder: Path) -> str:
    for number, (preset, saved, sharded, loaded) in enumerate(LAYOUTS):
        path = folder / str(number)
        with World(saved, backend=backend(), timeout=60) as world:
            first = prepare_untried(model_of(preset, 0), world, shard_parameters=sharded)
            save_model(first, path, world)
            expected = whole(first)
        with World(loaded, backend=backend(), timeout=60) as world:
            second = prepare_untried(model_of(preset, 1), world)
            load_weights(second, path, world)
            found = whole(second)
            assert len(found) > 5 and all(torch.equal(expected[n].cpu(), x.cpu()) for n, x in found.items()), number
            assert expected.keys() == found.keys()
    with World(Layout(2), backend=backend(), timeout=60) as world:
        first = prepare_untried(model_of("qwen3-tiny", 0, lora=True), world)
        save_model(first, folder / "adapter", world)
        second = prepare_untried(model_of("qwen3-tiny", 1, lora=True), world)
        load_weights(second, folder / "adapter", world)
        one, two = whole(first), whole(second)
        assert all(torch.equal(one[n], two[n]) == ("lora" in n) for n in one if "proj" in n)
        with pytest.raises(ModelError) as refused:
            load_weights(second, folder / "0", world)
        plain = prepare_untried(model_of("qwen3-moe-tiny", 1), world)
        with pytest.raises(ModelError, match=r"lacks .* weights"):
            load_weights(plain, folder / "0", world)
        return str(refused.value)


def test_a_folder_comes_back_bit_for_bit_under_another_layout(tmp_path: Path) -> None:
    texts = run_ranks(reload_rank, 2, tmp_path)
    assert texts[0] == texts[1] and "has no adapter_model.safetensors, and the model has an adapter" in texts[0]
    ids = torch.arange(9)[None]
    for number, (preset, *_) in enumerate(LAYOUTS):
        expected, path = model_of(preset, 0).eval(), tmp_path / str(number)
        stock = AutoModelForCausalLM.from_pretrained(path).eval()
        assert stock.config.architectures == [type(stock).__name__] == [type(expected).__name__]
        tied = stock.get_output_embeddings().weight is stock.get_input_embeddings().weight
        assert tied == stock.config.tie_word_embeddings == (preset != "llama")
        for read in (stock, load_model(path)):
            assert read.state_dict().keys() == expected.state_dict().keys()
            assert all(torch.equal(x, expected.state_dict()[n]) for n, x in read.state_dict().items()), preset
        assert torch.equal(stock(ids).logits, expected(ids).logits)


INTERLEAVED = {"virtual_stages": 2}
Cases = dict[str, tuple[Layout, str, str, dict[str, Any]]]  # a home, a family, an adapter, how it is prepared
FEW: Cases = {
    "pp 2, tied": (Layout(2, pp=2), "qwen3", "", {}),
    "adapted experts, transposed, pp 2": (Layout(2, pp=2), "gpt-oss", "experts", {}),
    "adapted experts, ep 2": (Layout(2, ep=2), "qwen3-moe", "experts", {}),
    "row-wise, tp 2": (Layout(2, tp=2), "llama", "row-wise alone", {}),
    "dora": (Layout(2), "llama", "dora", {}),
}
OTHERS_THAN_FEW: Cases = {
    "pp 2, interleaved": (Layout(2, pp=2), "llama", "", INTERLEAVED),
    "every linear, pp 2": (Layout(2, pp=2), "llama", "every linear", {}),
    "experts, ep 2": (Layout(2, ep=2), "qwen3-moe", "", {}),
    "ends": (Layout(2), "llama", "embedding and head", {}),
    "a module that is trained": (Layout(2), "llama", "modules_to_save", {}),
}


UNMERGED = {"ends", "dora"}  # other adapters than plain LoRA of linears


def stock(family: str, adapter: str) -> Any:
    return adapted(family, adapter) if adapter else deep(family, torch.float64, 4 if family == "llama" else 2, 62)


def stock_weights(family: str, adapter: str, merge: bool) -> dict[str, Tensor]:
    """The stock model's, each tied one once; merged by peft, or with the adapter as peft saves it."""
    model = stock(family, adapter)
    if not adapter:
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set[str]()
        return {name: x for name, x in model.state_dict().items() if name not in tied}
    if merge:
        return model.merge_and_unload().state_dict()
    of_adapter = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {**base_model(family, torch.float64).state_dict(), **of_adapter}


def compare(rank: int, cases: Cases) -> dict[str, dict[str, float]]:
    errors = dict[str, dict[str, float]]()
    for home, rows in groupby(cases.items(), key=lambda row: row[1][0]):
        with World(home, backend=backend(), timeout=60) as world:
            for name, (_, family, adapter, options) in rows:
                prepared = prepare_untried(stock(family, adapter), world, **options)
                for merge in (False, True) if adapter and name not in UNMERGED else (False,):
                    pairs = [(n, w.clone()) for n, w in weights_by_name(prepared, world, merge_adapter=merge)]
                    assert all(w.device.type == world.device.type and type(w) is Tensor for _, w in pairs)
                    weights, wanted = dict(pairs), stock_weights(family, adapter, merge)
                    assert len(pairs) == len(weights), "a weight came twice"
                    errors[f"{name}, merged" if merge else name] = {
                        n: error(weights[n], wanted[n]) if n in weights and n in wanted else torch.inf
                        for n in weights | wanted
                    }
    return errors


@pytest.mark.parametrize("cases", [FEW, pytest.param(OTHERS_THAN_FEW, marks=pytest.mark.whole)], ids=["few", "others"])
def test_weights_are_those_of_the_stock_model(cases: Cases) -> None:
    for errors in run_ranks(compare, 2, cases, timeout=240):
        merged = {name for name, (_, _, adapter, _) in cases.items() if adapter} - UNMERGED
        assert len(errors) == len(cases) + len(merged)
        for case, of_case in errors.items():
            limit = 1e-14 if case.endswith("merged") else 0.0  # of what is not merged, every bit
            assert max(of_case.values()) <= limit, (case, {n: e for n, e in of_case.items() if e > limit})


def refuse(rank: int) -> list[str]:
    said = list[str]()
    with World(Layout(2), backend=backend(), timeout=60) as world:
        adapted, copied = (
            prepare_untried(peft.get_peft_model(deep("qwen3", torch.float64, 2, 62), config), world)
            for config in (
                peft.LoraConfig(target_modules=["embed_tokens"]),
                peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
            )
        )
        for model, merge in ((deep("llama", torch.float64, 2), False), (adapted, True), (copied, True)):
            with pytest.raises(ModelError) as refusal:
                weights_by_name(model, world, merge_adapter=merge)
            said.append(str(refusal.value))
    return said


def test_refusals_come_before_the_first_weight() -> None:
    for said in run_ranks(refuse, 2):
        assert "longspan.prepare" in said[0]
        assert "merge_adapter does not know what model.embed_tokens.lora_embedding_A.default" in said[1]
        assert "lm_head.modules_to_save.default.weight is trained, and is the weight of the other end" in said[2]
