"""A run of `longspan train` with [lora]: the adapter alone is trained and saved, resumed at other homes, and read by
stock peft and transformers."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

from longspan import World
from longspan.checkpoint import base as unadapted_module
from longspan.checkpoint.base import check_base_unchanged, weight_sums
from longspan.checkpoint.storage import read_metadata
from longspan.cli.eval import main as eval_main
from longspan.cli.export import main as export_main
from longspan.cli.main import main as cli_main
from longspan.cli.train_flags import parse_train
from longspan.config.file import load_config, to_toml
from longspan.config.local_folders import with_local_folders
from longspan.config.sections import ParallelConfig, RunConfig
from longspan.errors import ConfigError, ModelError
from longspan.evaluation.evaluate_saved import evaluate_saved
from longspan.evaluation.request import EvalRequest, Subject, find_saved_weights
from longspan.layout import Layout
from longspan.model import load_model
from longspan.model.weights.hf_folder import read_configuration
from longspan.plan.shape.packed import packed_weights_of_model
from longspan.run import checks
from longspan.run.checks import check_config
from longspan.train.start.start_times import Starts
from tests.model.frozen.formats.folders import quantise_float8, read_float8
from tests.model.stock import SIZES, without_trials
from tests.run.runs.homes import ALONE, farthest, gone_on_from_the_first_checkpoint, lines_of, losses_of_run, train_rows
from tests.train.small import small_config, write_texts

LORA = {"lora__rank": 4, "train__steps": 3, "checkpoint__every": 2, "evaluation__every": 3, "optimizer__lr": 0.05}
Trained = tuple[RunConfig, list[float]]
IDS = torch.arange(40)[None] * 5 % 257
HOMES = {"tp 2": ParallelConfig(tp=2), "pp 2": ParallelConfig(pp=2)}


def write_base(folder: Path, kind: Any = LlamaConfig, **sizes: Any) -> Path:
    config = kind(**SIZES | {"vocab_size": 258, "tie_word_embeddings": False, "max_position_embeddings": 512} | sizes)
    load_model(config=config, dtype="float64").save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate([*alphabet, "<|endoftext|>"])}
    bare = Tokenizer(models.BPE(words, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def adapter(config: RunConfig) -> dict[str, Tensor]:
    return load_file(Path(config.run.dir) / "model" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("lora")
    base = write_base(folder / "base")
    config = small_config(folder, model__path=str(base), model__dtype="float64", **LORA)
    return config, losses_of_run(config, 2)


def test_a_checkpoint_holds_the_adapter_and_its_moments_alone(trained: Trained) -> None:
    config, losses = trained
    stored = read_metadata(Path(config.run.dir) / "checkpoints/step-000003").state_dict_metadata
    weights = {name for name in stored if name.startswith("model.")}
    assert len(weights) == 2 * 7 * 2 and all(".lora_" in name for name in weights)
    assert all(".lora_" in name for name in stored if name.startswith("optimizer."))
    assert losses[2] < losses[0]
    facts = json.loads((Path(config.run.dir) / "run.json").read_text())
    assert facts["trained"] == sum(tensor.numel() for tensor in adapter(config).values())


@pytest.mark.parametrize("home", [pytest.param("tp 2", marks=pytest.mark.whole), "pp 2"])
def test_a_run_goes_on_at_another_home(trained: Trained, home: str, tmp_path: Path) -> None:
    config, losses = trained
    other = gone_on_from_the_first_checkpoint(config, tmp_path / "run", HOMES[home])
    alone = {"context_parallel_size": 1, "max_tokens_per_slot": 128}
    context, evaluation = replace(config.context, **alone), replace(config.evaluation, **alone)
    other = replace(other, context=context, evaluation=evaluation)
    resumed = losses_of_run(other, 2)
    assert len(train_rows(other)) == 3 and farthest(resumed[:3], losses[:3]) <= 1e-9
    wanted = adapter(config)
    assert max(float((adapter(other)[name] - tensor).abs().max()) for name, tensor in wanted.items()) <= 1e-9


def test_stock_libraries_read_what_is_saved(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = trained
    assert export_main([config.run.dir, str(tmp_path / "adapter")]) == 0
    assert export_main([config.run.dir, str(tmp_path / "merged"), "--merge", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["dtype"] == "float64"
    saved, exported = adapter(config), load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == exported.keys() and all(torch.equal(saved[name], x) for name, x in exported.items())
    stock, merged = _stock(config), _merged(tmp_path / "merged")
    with torch.no_grad():
        wanted = stock(input_ids=IDS).logits
        assert (merged(input_ids=IDS).logits - wanted).abs().max() <= 1e-12 * wanted.abs().max()
        with stock.disable_adapter():
            assert (stock(input_ids=IDS).logits - wanted).abs().max() > 1e-3
        written = [m.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0) for m in (stock, merged)]
    assert torch.equal(*written)


def _stock(config: RunConfig, dtype: torch.dtype = torch.float64) -> Any:
    base = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype)
    return peft.PeftModel.from_pretrained(base, config.run.dir + "/model", torch_device="cpu").eval()


def _merged(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("kind", [Qwen3MoeConfig, pytest.param(GptOssConfig, marks=pytest.mark.whole)])
def test_adapters_of_experts_are_read_and_merged(kind: Any, tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    base = write_base(tmp_path / "base", kind, **sizes)
    targets = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
    config = _run_over(str(base), tmp_path, lora__target_modules=targets)
    saved = adapter(config)
    assert len(saved) == 2 * 2 * 3 and all(x.abs().max() > 0 for x in saved.values())
    assert export_main([config.run.dir, str(tmp_path / "merged"), "--merge"]) == 0
    with torch.no_grad():
        stock, merged = _stock(config), _merged(tmp_path / "merged")
        for model in (stock.get_base_model(), merged):
            model.set_experts_implementation("eager")  # in float64
        wanted = stock(input_ids=IDS).logits
        assert (merged(input_ids=IDS).logits - wanted).abs().max() <= 1e-12 * wanted.abs().max()
        with stock.disable_adapter():
            assert (stock(input_ids=IDS).logits - wanted).abs().max() > 1e-4
    with pytest.raises(
        ModelError, match=r"lora.dropout is 0.1, and lora.target_modules has experts \(experts.down_proj"
    ):
        _run_over(str(base), tmp_path / "other", lora__target_modules=["experts.down_proj"], lora__dropout=0.1)


def test_one_export_takes_the_place_of_another(trained: Trained, tmp_path: Path) -> None:
    config, out = trained[0], tmp_path / "out"
    names = list[set[str]]()
    for words in (["--merge"], [], ["--merge", "--dtype", "float32"]):
        assert export_main([config.run.dir, str(out), "--overwrite", *words]) == 0
        names.append({file.name for file in out.iterdir()})
    of_adapter, of_model = {"adapter_config.json", "adapter_model.safetensors"}, {"config.json", "model.safetensors"}
    assert names[0] == names[2]
    assert names[1] - names[0] == of_adapter and names[0] - names[1] == of_model
    with torch.no_grad():
        wanted = _stock(config, torch.float32)(input_ids=IDS).logits
        assert (_merged(out, torch.float32)(input_ids=IDS).logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")  # peft's own
def test_the_adapter_of_a_tied_head_is_not_merged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = {"lora__rank": 2, "lora__target_modules": ["q_proj", "lm_head"], "train__steps": 1}
    changes["evaluation__documents"] = 0
    config = small_config(tmp_path, **changes, evaluation__every=0, checkpoint__every=1, **ALONE)
    assert "caution: lora.target_modules has the head, which shares its weight" in lines_of(0, config, 1)
    assert cli_main(["export", config.run.dir, str(tmp_path / "out"), "--merge"]) == 2
    assert "lm_head has an adapter, and shares its weight with the other end" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
    assert cli_main(["export", config.run.dir, str(tmp_path / "out")]) == 0


def test_the_folder_of_an_adapter_is_refused(
    trained: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(trained[0].run.dir) / "model"
    wanted = f"without the model that it belongs to. Name the run that trained it ({folder.parent})"
    assert cli_main(["eval", str(folder), "--data", str(tmp_path)]) == 2
    assert wanted in capfd.readouterr().err
    for read in (read_configuration, load_model):
        with pytest.raises(ModelError, match=re.escape(wanted) + ".*export .* FOLDER --merge"):
            read(folder)


def test_evaluation_with_and_without_the_adapter(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    config, losses = trained

    def record(*words: str) -> dict[str, Any]:
        flags = ["--evaluation.context_parallel_size", "1", "--model.dtype", "float64", "--json"]
        assert eval_main([config.run.dir, *words, "--world", "1", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    def compared(of: dict[str, Any]) -> float:
        return of["compare"]["evaluations"][0]["eval_loss"]

    adapted = record("--compare", "base")
    assert adapted["eval_loss"] == pytest.approx(losses[-1], rel=1e-12)
    assert adapted["compare"]["target"].endswith("run without adapter")
    base = compared(record("--compare", config.model.path))
    assert base == pytest.approx(compared(adapted), rel=1e-14) and base > losses[-1]


def test_without_an_adapter_no_base_is_compared(
    trained: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = small_config(tmp_path)
    Path(whole.run.dir).mkdir()
    (Path(whole.run.dir) / "config.toml").write_text(to_toml(whole))
    for target in (trained[0].model.path, whole.run.dir):
        assert cli_main(["eval", target, "--data", str(tmp_path), "--compare", "base"]) == 2
        error = capfd.readouterr().err
        assert "--compare base is given, and" in error and "trains no adapter (lora.rank is 0); leave it out" in error


# ---- the base model, by its weights and not by its path alone


def _run_over(base: str, folder: Path, **keys: Any) -> RunConfig:
    """One step of a run over a base model, in this process."""
    changes = {**ALONE, **LORA, "train__steps": 1, "evaluation__every": 0, "checkpoint__every": 1, **keys}
    config = with_local_folders(small_config(folder, model__path=base, model__dtype="float64", **changes))
    train_rows(config, 1)
    return config


def test_a_base_in_8_bits_merges_into_dequantised_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its plans count them as the folder stores them. Training of all weights over it is refused."""
    base = write_base(tmp_path / "base", hidden_size=64, intermediate_size=96)
    quantise_float8(base, weight_block_size=None, activation_scheme="static")
    config = _run_over(str(base), tmp_path, train__device_memory_limit=10**9)
    memory = json.loads((Path(config.run.dir) / "run.json").read_text())["memory"]
    assert memory["device"]["packed"] == packed_weights_of_model(base, "stored").bytes > 0
    assert cli_main(["export", config.run.dir, str(tmp_path / "out"), "--merge", "--dtype", "float64"]) == 0
    exact = {name: x.double() for name, x in read_float8(base, torch.float64).items()}
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == exact.keys()
    saved = {name.removeprefix("base_model.model."): x.double() for name, x in adapter(config).items()}
    adapted = {name.replace("lora_A.", "") for name in saved if "lora_A" in name}
    assert len(adapted) == 14
    for name, weight in exact.items():
        if name in adapted:
            a, b = (saved[name.replace("weight", f"lora_{matrix}.weight")] for matrix in "AB")
            assert b.abs().max() > 0
            weight = weight + 2 * b @ a
        assert (merged[name] - weight).abs().max() <= 1e-12 * weight.abs().max(), name
    capfd.readouterr()
    whole = [f"{config.run.dir}/config.toml", "--lora.rank", "0", "--run.dir", str(tmp_path / "whole")]
    assert cli_main(["train", *whole, "--world", "1", "--device", "cpu"]) == 2
    assert "is quantized (fp8, by its config.json), and whole weights are trained" in capfd.readouterr().err


def test_frozen_weights_keep_the_dtype_of_their_folder(tmp_path: Path) -> None:
    """A run that began in another dtype goes on in it, whatever its folder says now."""
    base = write_base(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)

    def config_of(run: str, **keys: Any) -> RunConfig:
        changes = {**ALONE, **LORA, "train__steps": 2, "checkpoint__every": 1, "evaluation__every": 0, **keys}
        return small_config(tmp_path, model__path=str(base), run__dir=str(tmp_path / run), **changes)

    by_default, given = config_of("default"), config_of("given", model__dtype="bfloat16")
    in_float32 = config_of("float32", model__dtype="float32")
    line = "precision frozen weights keep the folder's bfloat16 (model.dtype), adapters float32, compute bfloat16"
    assert line in " ".join(lines_of(0, by_default, 1).split())
    losses = [row["loss"] for row in train_rows(by_default)]
    assert [row["loss"] for row in train_rows(given, 1)] == losses != [row["loss"] for row in train_rows(in_float32, 1)]
    assert {x.dtype for x in adapter(by_default).values()} == {torch.float32}
    assert all(x.equal(adapter(given)[name]) for name, x in adapter(by_default).items())
    assert _eval_loss(by_default.run.dir) == _eval_loss(given.run.dir)
    assert 'dtype = "bfloat16"\n' in Path(by_default.run.dir, "config.toml").read_text()

    file = Path(in_float32.run.dir, "config.toml")
    file.write_text(file.read_text().replace('dtype = "float32"\n', ""))  # as one of before may be
    longer = config_of("float32", train__steps=3)
    assert longer.model.dtype == load_config(file).model.dtype == "float32"
    assert "frozen weights float32 (model.dtype; the folder has bfloat16), adapters float32" in lines_of(0, longer, 1)
    edit_configuration(base, dtype="float32")
    assert config_of("default", train__steps=3).model.dtype == "bfloat16"
    assert config_of("new").model.dtype == config_of("default", lora__rank=0).model.dtype == "float32"


def _set_base(run: str, folder: Path) -> None:
    config = load_config(f"{run}/config.toml")
    Path(run, "config.toml").write_text(to_toml(replace(config, model=replace(config.model, path=str(folder)))))


def edit_configuration(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    write_json(file, json.loads(file.read_text()) | values)


def write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values))


def _refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli_main([*words]) == 2
    return capfd.readouterr().err


def _eval_loss(run: str) -> float:
    request = EvalRequest(subjects=(Subject(find_saved_weights(run), load_config(f"{run}/config.toml")),))
    with World(Layout(1), backend="gloo", device="cpu") as world, without_trials():
        (result,) = evaluate_saved(request, world, print, lambda *_: None, Starts())
    return result.sets[0].evaluation.loss


def _refused_start(run: str, *words: str) -> str:
    _, config = parse_train([f"{run}/config.toml", "--train.steps", "2", *words])
    with pytest.raises(ModelError) as error:
        lines_of(0, config, 1)
    return str(error.value)


def test_a_base_is_known_by_its_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, run, out = write_base(tmp_path / "here" / "base"), str(tmp_path / "run"), tmp_path / "out"
    other = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    with torch.no_grad():
        other.model.layers[1].self_attn.q_proj.weight[-1] *= 2
    other.save_pretrained(tmp_path / "there" / "base")
    monkeypatch.chdir(base.parent)
    write_texts(Path("texts"))
    _run_over("base", tmp_path, data__path="texts", checkpoint__dir="saved")
    monkeypatch.chdir(tmp_path / "there")  # with a base of its own, without texts and checkpoints
    loss = _eval_loss(run)
    capfd.readouterr()
    assert cli_main(["eval", run, "--world", "1", "--device", "cpu", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["eval_loss"] == loss
    assert cli_main(["export", run, str(out), "--merge"]) == 0
    exported, kept = (load_file(folder / "model.safetensors")["model.embed_tokens.weight"] for folder in (out, base))
    assert exported.equal(kept)
    assert json.loads((Path(run) / "model/adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert "2 of 2 steps" not in (told := lines_of(0, parse_train([f"{run}/config.toml"])[1], 1)), told

    moved = base.rename(tmp_path / "moved")
    (tmp_path / "m").mkdir()  # links to files, as the hub's cache has them, and a link to their folder
    for file in moved.iterdir():
        (tmp_path / "m" / file.name).symlink_to(file)
    (tmp_path / "link").symlink_to(tmp_path / "m")
    gone = f"the adapter of {run} needs the weights of {base} (model.path), which is gone; put them back, or set"
    assert gone in _refused(capfd, "eval", run) and gone in _refused_start(run)
    assert gone in _refused(capfd, "export", run, str(tmp_path / "no"), "--merge")
    _set_base(run, moved)  # the same weights
    assert _eval_loss(run) == loss
    _set_base(run, tmp_path / "link")
    assert cli_main(["export", run, str(out), "--merge", "--overwrite"]) == 0

    changed = tmp_path / "there" / "base"
    other_weights = re.escape(f"began over the weights of {base} (model.path) with the sum ") + "[0-9a-f]{12}, and "
    other_weights += (
        re.escape(f"{changed} has others now, with the sum ")
        + "[0-9a-f]{12}, in model.safetensors; put them back, or set"
    )
    _set_base(run, changed)
    for words in (["eval", run], ["export", run, str(tmp_path / "no"), "--merge"]):
        assert re.search(other_weights, _refused(capfd, *words))
    _set_base(run, base)
    assert re.search(other_weights, _refused_start(run, "--model.path", "base"))
    changed.rename(base)  # written over
    for words in (["eval", run], ["eval", run, "--compare", "base"], ["export", run, str(tmp_path / "no"), "--merge"]):
        assert "has others now, with the sum" in _refused(capfd, *words)
    assert "has others now, with the sum" in _refused_start(run)
    assert not (tmp_path / "no").exists()

    settings = json.loads((moved / "config.json").read_text())
    kept = Path(run, "config.json").read_text()
    rope = {**settings["rope_parameters"], "rope_theta": 20.0}
    write_json(moved / "config.json", settings | {"rope_parameters": rope, "rms_norm_eps": 0.5})
    _set_base(run, moved)
    edited = f"{moved} has another now: rms_norm_eps was 1e-06 and is 0.5 now, rope_parameters.rope_theta was 10000 "
    edited += "and is 20 now; set that back, or set "
    prompt = ("--prompt", "a", "--world", "1", "--device", "cpu")
    for words in (["eval", run], ["generate", run, *prompt], ["export", run, str(tmp_path / "no"), "--merge"]):
        assert f"{edited}model.path in {run}/config.toml" in _refused(capfd, *words)
    assert f"{edited}run.dir to a new folder" in _refused_start(run)
    write_json(moved / "config.json", settings | {"eos_token_id": 5, "dtype": "float32"})

    _, resumed = parse_train([f"{run}/config.toml", "--train.steps", "2", "--model.path", "../moved"])
    told = lines_of(0, resumed, 1)
    assert "going on from" in told and len(train_rows(resumed)) == 2
    assert (
        "in what decides no number or one version of transformers alone writes: eos_token_id was null and is 5 now; "
        in told
    )
    assert Path(run, "config.json").read_text() == kept
    assert f'path = "{tmp_path}/there/../moved"' in (Path(run) / "config.toml").read_text()
    _refuse_damaged_records(run)
    (Path(run) / "base.json").unlink()  # as a run of before
    assert _eval_loss(run) == _eval_loss(run)
    _, other = parse_train([f"{run}/config.toml", "--train.steps", "3", "--model.path", str(tmp_path / "m")])
    with pytest.raises(ConfigError, match=r"model.path was '.*moved' when .* was saved and is '.*/m' now"):
        lines_of(0, other, 1)


def _refuse_damaged_records(run: str) -> None:
    """base.json as an earlier version wrote it is read, and what is none, or contradicts itself, is named."""
    file = Path(run, "base.json")
    text = file.read_text()
    record = json.loads(text)
    write_json(file, {key: record[key] for key in ("folder", "sum")})
    assert _eval_loss(run)
    flipped = "".join("b" if digit == "a" else "a" for digit in record["sum"][:1]) + record["sum"][1:]
    contents = ["", text[:-9], "[]", "{}", '{"folder": 1, "sum": "a"}', json.dumps(record | {"sum": flipped})]
    contents += [
        json.dumps(record | {"files": {"model.safetensors": [1, flipped]}}),
        '{"folder": "", "sum": "", "files": 1}',
    ]
    for content in contents:
        file.write_text(content)
        with pytest.raises(ModelError, match=re.escape(f"{file} is damaged (")):
            check_base_unchanged(Path(run), load_config(f"{run}/config.toml"), "cpu")
    file.write_text(text)


def test_a_base_of_the_hub_is_named_with_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # or it is asked again and again
    repo, commits = tmp_path / "hub" / "models--acme--m", ("a" * 40, "b" * 40)
    bases = [write_base(tmp_path / commit) for commit in commits]
    other = AutoModelForCausalLM.from_pretrained(bases[1], dtype=torch.float64)
    other.model.embed_tokens.weight.data *= 2
    other.save_pretrained(bases[1])
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commits[1])  # the branch has moved on
    for base, commit in zip(bases, commits, strict=True):
        (repo / "snapshots" / commit).mkdir(parents=True)
        for file in base.iterdir():
            blob = repo / "blobs" / f"{commit[:4]}{file.name}"
            blob.parent.mkdir(exist_ok=True)
            file.rename(blob)
            (repo / "snapshots" / commit / file.name).symlink_to(blob)
    link = tmp_path / "link"
    link.symlink_to(repo / "snapshots" / commits[0])
    config = _run_over(str(link), tmp_path)
    saved = json.loads((Path(config.run.dir) / "model/adapter_config.json").read_text())
    assert (saved["base_model_name_or_path"], saved["revision"]) == ("acme/m", commits[0])
    where: Any = {"cache_dir": tmp_path / "hub", "local_files_only": True, "dtype": torch.float64}
    stock = peft.AutoPeftModelForCausalLM.from_pretrained(f"{config.run.dir}/model", **where)
    with torch.no_grad():
        assert torch.equal(stock(input_ids=IDS).logits, _stock(config)(input_ids=IDS).logits)


def test_a_sum_covers_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = {"large": torch.rand(9000, 4, generator=draw), "fused": torch.rand(3, 4, 5, generator=draw).bfloat16()}
    tensors |= {"norm": torch.rand(7, generator=draw), "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4)}

    def sum_of(**changes: Tensor) -> str:
        save_file(tensors | changes, tmp_path / "model.safetensors")
        return weight_sums(tmp_path)["sum"]

    first = sum_of()
    for name, tensor in tensors.items():
        changes = [tensor[:, None]] if tensor.ndim else []  # another shape
        for place in {0, tensor.numel() - 1} if tensor.numel() else ():
            changes.append(tensor.clone())
            changes[-1].view(-1)[place] += 1
        assert first not in {sum_of(**{name: changed}) for changed in changes}, name
    assert first == sum_of()
    monkeypatch.setattr(unadapted_module, "BLOCKS", 4)  # of a large folder the size, both ends and some more are read
    file, first = tmp_path / "model.safetensors", sum_of()
    whole = file.read_bytes()
    for changed in (whole[:-1] + b"x", b"x" + whole[1:], whole + b"x"):
        file.write_bytes(changed)
        assert weight_sums(tmp_path)["sum"] != first


def test_peft_is_missed_before_a_corpus_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lora.rank is 4, and peft, .* installed: pip install 'longspan\[lora\]'"):
        check_config(load_config(None, {"lora.rank": 4}), 4)


def test_the_learning_rate_of_adapters_has_a_default() -> None:
    assert load_config(None, {"lora.rank": 8, "model.path": "x"}).optimizer.lr == 2e-4
    assert load_config(None, {"lora.rank": 8, "model.path": "x", "train.loss": "dpo"}).optimizer.lr == 5e-6
    assert "rank = 8" in to_toml(load_config(None, {"lora.rank": 8}))
