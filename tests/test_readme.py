"""README's first block runs as it stands, with a tiny model and short chats in place of downloads."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from longspan.cli.main import main

ROOT = Path(__file__).parent.parent


def test_the_first_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[0]
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    verbs = [words[:2] for words in commands]
    assert verbs[:3] == [["pip", "install"], ["hf", "download"], ["python", "bench/data/made_chats.py"]]
    folder, made = commands[1][-1], commands[2][2]
    monkeypatch.chdir(tmp_path)
    lengths = ["--chats", "12", "--shortest", "64", "--longest", "300", "--vocabulary", "400"]
    subprocess.run([sys.executable, str(ROOT / "bench/data/made_chats.py"), made, *lengths], check=True)
    tokenizer = AutoTokenizer.from_pretrained(f"{made}/tokenizer")
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
    for words in commands[3:]:
        assert words.pop(0) == "longspan"
        ranks = ["--world", "2", "--device", "cpu"] if words[0] in ("train", "eval") else []
        assert main([*words, *ranks]) == 0, capsys.readouterr()
    assert (tmp_path / "exported/model.safetensors").is_file()
