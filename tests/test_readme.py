"""README's commands run as they stand, with a tiny model and short chats for downloads; its figures are recorded."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from longspan.cli.main import main

ROOT = Path(__file__).parent.parent


README = (ROOT / "README.md").read_text()


def test_the_commands_for_gpus_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        shlex.split(line, comments=True)
        for line in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)[1].splitlines()
    ]
    assert [words[:2] for words in commands[:2]] == [["pip", "install"], ["hf", "download"]]
    name = commands[1][-1]
    cached = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    folder = cached / "snapshots/1"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    lengths = ["--chats", "12", "--shortest", "64", "--longest", "300", "--vocabulary", "400"]
    subprocess.run([sys.executable, str(ROOT / "bench/data/made_chats.py"), ".", *lengths], check=True)
    tokenizer = AutoTokenizer.from_pretrained("tokenizer")
    tokenizer.save_pretrained(folder)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    config = Qwen3Config(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=1 << 18)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("1")
    plan = re.search(r"`longspan (plan .*?)`", README)
    assert plan is not None and main(shlex.split(plan[1])) == 0
    for words in commands[2:]:
        assert words.pop(0) == "longspan"
        ranks = ["--world", "2", "--device", "cpu"] if words[0] == "train" else []
        assert main([*words, *ranks]) == 0, capsys.readouterr()
    assert (tmp_path / "exported/model.safetensors").is_file()


def test_figures_of_speed_are_recorded() -> None:
    rows = re.findall(r"^\| \d+K \| ([\d,]+) \| ([\d,]+) \| \[.*?\]\((.*?)\)", README, re.M)
    assert len(rows) == 3
    for ours, theirs, record in rows:
        lines = (ROOT / record).read_text().splitlines()
        assert any(f"| {ours} |" in line and "longspan" in line for line in lines)
        assert any(f"| {theirs} |" in line and "Hugging Face" in line for line in lines)
