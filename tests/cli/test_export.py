"""`longspan export`: checkpoints of any home become folders that stock transformers loads, with all that belongs."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from longspan.cli.main import main
from longspan.config.sections import RunConfig
from longspan.corpus.tokenizer import train_tokenizer
from longspan.data.corpus_documents import Corpus
from longspan.data.run_order import make_step_order
from longspan.model.weights.write import weight_unit
from longspan.run.metrics import read_metrics
from longspan.testing import run_ranks
from tests.model.deep import deep_config
from tests.train.small import small_config, train_rank

HOMES = {"tp": {"parallel__tp": 2}, "ep": {"parallel__ep": 2}}


def _source(folder: Path) -> Path:
    torch.manual_seed(0)
    config = deep_config("qwen3-moe", layers=2, vocabulary=300)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95)
    model.save_pretrained(folder)
    train_tokenizer(["some text of a tokenizer"], 300).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


def _train_each(rank: int, configs: list[RunConfig]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # two hosts, as run.json says
    for config in configs:
        train_rank(rank, config, 2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    path = tmp_path_factory.mktemp("export")
    source, configs = _source(path / "source"), dict[str, RunConfig]()
    for name, axes in HOMES.items():
        context = {"context__context_parallel_size": 1 + (name == "ep"), "evaluation__context_parallel_size": 1}
        steps = 1 + (name == "tp")  # of one run the earlier checkpoint is exported too
        keys = {"model__path": str(source), "train__steps": steps, "checkpoint__every": 1, **axes, **context}
        configs[name] = small_config(path / name, evaluation__every=0, **keys)
    run_ranks(_train_each, 2, [*configs.values()], timeout=120)
    return configs


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def _bytes(folder: Path, *left_out: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name not in left_out}


@pytest.mark.parametrize("home", HOMES)
def test_a_run_is_exported_as_its_model_was_saved(
    runs: dict[str, RunConfig], home: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, out, source = Path(runs[home].run.dir), tmp_path / "out", Path(runs[home].model.path)
    assert main(["export", str(run), str(out), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert json.loads((run / "run.json").read_text())["hosts"] == (1 if home == "tp" else 2)
    assert (told["step"], told["dtype"], told["files"]) == (runs[home].train.steps, "bfloat16", 1)
    assert _bytes(run / "model", "model.safetensors") == _bytes(out, "model.safetensors", "README.md")
    old, new = _weights(run / "model"), _weights(out)
    assert old.keys() == new.keys() == _weights(source).keys() and all(old[name].equal(new[name]) for name in old)
    assert told["tensors"] == len(new) and told["bytes"] == sum(x.nbytes for x in new.values())
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    for name in (*names, "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    assert json.loads((source / "config.json").read_text()) == json.loads((out / "config.json").read_text())
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(source).chat_template


def test_exports_have_a_runs_loss(runs: dict[str, RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.model.weights.write.FILE_BYTES", 40_000)
    run, out = Path(runs["tp"].run.dir), tmp_path / "out"
    assert main(["export", str(run / "checkpoints" / "step-000002"), str(out), "--dtype", "float32"]) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    names = ("model.layers.12.mlp.experts.gate_up_proj", "lm_head.weight")
    assert [weight_unit(name) for name in names] == ["model.layers.12", "lm_head.weight"]  # what a writer holds
    assert max(path.stat().st_size for path in out.glob("*.safetensors")) < 50_000
    exported, saved = _weights(out), _weights(run / "model")
    assert exported.keys() == index["weight_map"].keys()
    assert saved.keys() == exported.keys() and all(x.equal(exported[name].bfloat16()) for name, x in saved.items())
    (evaluated,) = [row for row in read_metrics(run / "metrics.jsonl") if "eval_loss" in row]
    model, corpus, losses = AutoModelForCausalLM.from_pretrained(out, dtype="auto"), Corpus(run / "corpus"), []
    for document in make_step_order(runs["tp"], corpus).evaluation:
        ids = torch.from_numpy(corpus[document][np.arange(len(corpus[document]))])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        losses += F.cross_entropy(logits.double(), ids[1:], reduction="none").tolist()
    assert np.mean(losses) == pytest.approx(evaluated["eval_loss"], rel=1e-6)
    assert main(["export", str(run / "checkpoints" / "step-000001"), str(tmp_path / "earlier")]) == 0
    earlier = _weights(tmp_path / "earlier")
    assert earlier.keys() == saved.keys()
    assert not any(x.equal(saved[name]) for name, x in earlier.items() if "norm" not in name)


def test_full_folders_are_kept(runs: dict[str, RunConfig], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, out = runs["ep"].run.dir, tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert main(["export", run, str(out)]) == 2
    full = f"{out} is not empty; name another folder, or replace the model in it with --overwrite"
    assert full in capfd.readouterr().err
    assert main(["export", run, str(out), "--overwrite"]) == 2
    assert "holds no model (no config.json), so nothing in it is replaced" in capfd.readouterr().err
    shutil.copytree(runs["ep"].model.path, out, dirs_exist_ok=True)
    (out / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier model")
    assert main(["export", run, str(out), "--overwrite"]) == 0
    wanted = {*_bytes(Path(run) / "model"), "notes.txt", "README.md"}
    assert set(_bytes(out)) == wanted and (out / "notes.txt").read_text() == "mine"
    assert all(x.equal(_weights(out)[name]) for name, x in _weights(Path(run) / "model").items())


def test_figures_of_the_card(runs: dict[str, RunConfig], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, out = Path(runs["tp"].run.dir), tmp_path / "out"
    checkpoint, card = str(run / "checkpoints" / "step-000001"), out / "README.md"
    assert main(["export", str(run), str(out)]) == 0
    metadata, text = ModelCard.load(card).data.to_dict(), card.read_text()
    assert metadata == {"library_name": "transformers", "tags": ["longspan"]}  # the base is a folder of this machine
    rows = read_metrics(run / "metrics.jsonl")
    losses, (evaluated,) = [row["loss"] for row in rows if "loss" in row], [row for row in rows if "eval_loss" in row]
    trained, loss = sum(row["tokens"] for row in rows if "loss" in row), evaluated["eval_loss"]
    assert "Trained from source, by longspan" in text and "the weights after step 2 (" in text
    assert 'AutoModelForCausalLM.from_pretrained("out")' in text and str(tmp_path.parent) not in text
    assert f"| trained | 2 of 2 steps, {trained:,} tokens |" in text
    assert f"| mean loss of the last 2 steps | {sum(losses) / 2:.4f} |" in text
    where = f"| loss of held-out documents, degree {evaluated['cp']} |"
    assert f"{where} {loss:.4f}, perplexity {evaluated['eval_perplexity']:.4g} |" in text
    data = dict(json.loads((run / "run.json").read_text())["lines"])["data"]
    assert f"| documents | {data} |" in text and "held out" in data
    assert main(["export", checkpoint, str(out), "--overwrite"]) == 0  # its own card is written anew
    assert "step 1 (" in card.read_text() and f"of the last 1 step | {losses[0]:.4f}" in card.read_text()
    assert "perplexity" not in card.read_text()
    assert "cannot be read" not in capfd.readouterr().out
    card.write_text("mine")
    assert main(["export", checkpoint, str(out), "--overwrite"]) == 0
    assert card.read_text() == "mine" and f"{card} is kept, for longspan did not write it" in capfd.readouterr().out


def test_a_card_names_what_came_from_the_hub(
    runs: dict[str, RunConfig], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["tp"].run.dir, run, ignore=shutil.ignore_patterns("run.json"))
    toml = (run / "config.toml").read_text().replace("epochs = 0.0", "epochs = 1.0")
    toml = toml.replace("\nsteps = 2", "\nsteps = 300")  # as a run by epochs has them, whose steps it counted
    cached = {"models--an-org--base": runs["tp"].model.path, "datasets--an-org--texts": runs["tp"].data.path}
    for name, path in cached.items():
        toml = toml.replace(f'"{path}"', f'"{tmp_path / name / "snapshots" / "abc"}"')
    (run / "config.toml").write_text(toml)
    assert "epochs = 1.0\n" in toml and main(["export", str(run), str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    named = {"base_model": "an-org/base", "datasets": ["an-org/texts"]}
    assert ModelCard(text).data.to_dict() == named | {"library_name": "transformers", "tags": ["longspan"]}
    assert "Trained from an-org/base, by" in text and "| data | an-org/texts" in text and "documents |" not in text
    (run / "metrics.jsonl").write_text('{"step": 2, "loss": "none", "tokens": 9}')  # no figures, and no error
    assert main(["export", str(run), str(tmp_path / "out"), "--overwrite"]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| trained | 2 of 2 steps, 9 tokens |" in text and "mean loss" not in text
    out = capfd.readouterr().out
    for name, reason in (("run.json", "No such file or directory"), ("metrics.jsonl", "TypeError: ")):
        assert f"{run / name} cannot be read ({reason}" in out and f"so {tmp_path / 'out/README.md'} has no" in out


class Hub:  # the calls of huggingface_hub's HfApi that an upload makes
    calls: ClassVar[list[tuple[Any, ...]]] = []

    def whoami(self) -> dict[str, str]:
        return {"name": "me"}

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        self.calls.append((repo_id, private, exist_ok))
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.calls.append((repo_id, {path.name for path in folder_path.iterdir()}, commit_message))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_mine")
    monkeypatch.setattr(Hub, "calls", [])
    return Hub


def test_an_export_is_uploaded_with_its_card(
    runs: dict[str, RunConfig], hub: type[Hub], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, out = runs["tp"].run.dir, tmp_path / "out"
    assert main(["export", run, str(out), "--push", "me/mine"]) == 0
    assert capfd.readouterr().out.endswith("\nhttps://huggingface.co/me/mine\n")
    created, (name, files, message) = hub.calls
    assert created == ("me/mine", True, True) and name == "me/mine" and message.startswith("Step 2, by longspan")
    assert files == set(_bytes(out)) >= {"README.md", "config.json", "model.safetensors"}
    assert 'from_pretrained("me/mine")' in (out / "README.md").read_text()
    assert main(["export", run, str(out), "--overwrite", "--push", "me/mine", "--public", "--json"]) == 0
    assert hub.calls[2] == ("me/mine", False, True)
    assert json.loads(capfd.readouterr().out)["pushed"] == "https://huggingface.co/me/mine"


def test_what_cannot_be_uploaded_is_one_line(
    runs: dict[str, RunConfig], hub: type[Hub], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = runs["tp"].run.dir, tmp_path / "out"

    def refused(*words: str) -> str:
        assert main(["export", run, str(out), *words]) == 2
        return capfd.readouterr().err

    for name in ("mine", "a/b/c", "/tmp/x"):
        assert f"--push '{name}' is no name of the hub; give ORG/NAME" in refused("--push", name)
    assert "--public is given without --push" in refused("--public")
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.get_token", lambda: None)
        assert "needs a login to the hub, and there is none; hf auth login" in refused("--push", "me/mine")
    with monkeypatch.context() as patch:
        patch.setattr(Hub, "whoami", lambda self: 1 / 0)
        assert "does not accept the login: ZeroDivisionError" in refused("--push", "me/mine")
    assert not out.exists() and not hub.calls

    def upload_folder(self: Hub, **_: Any) -> None:
        raise OSError("403\n\nForbidden")

    monkeypatch.setattr(Hub, "upload_folder", upload_folder)
    error = refused("--push", "me/mine")
    assert f"{out} is written, and cannot be uploaded: OSError: 403 Forbidden; hf upload me/mine {out}" in error
    assert (out / "README.md").is_file()


def test_refused_checkpoints(runs: dict[str, RunConfig], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(runs["ep"].run.dir, tmp_path / "run")
    checkpoint = run / "checkpoints" / "step-000001"
    config = json.loads((run / "config.json").read_text())

    def refused(target: Path) -> str:
        assert main(["export", str(target), str(tmp_path / "out")]) == 2
        return capfd.readouterr().err

    (run / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert "does not fit the run's model: it has" in (err := refused(run)) and "model.layers.1." in err
    (run / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    assert "model.layers.1.mlp.down_proj.weight is (32, 48), and (32, 40) by the config" in refused(run)
    file = min(checkpoint.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert f"{file.name} has other contents than were written" in refused(checkpoint)
    (run / "config.json").unlink()
    assert "was begun before longspan 0.1; name the folder of a run" in refused(run)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out*"))
