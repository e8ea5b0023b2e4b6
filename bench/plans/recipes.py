"""What the recipes of examples/recipes hold and take on 1, 4 and 8 GPUs, by `longspan train FILE --dry-run`.

    python bench/plans/recipes.py [NAME ...] [--check]

writes the table of examples/recipes/README.md (`make recipes`); --check compares it with what is written there. The
families' configurations are those of their published models, and the chats are made: MADE says how long. Nothing is
downloaded, and no weights are read.
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from longspan.errors import plural  # noqa: E402
from longspan.plan.shape.model_shape import QWEN3_8B  # noqa: E402

FOLDER = ROOT / "examples" / "recipes"
PAGE = FOLDER / "README.md"
GPUS = (("h100", "H100 80 GB"), ("h200", "H200"))
COUNTS = (1, 4, 8)
MADE = {"32k": (1024, 32768, 40), "128k": (8192, 131072, 20)}  # tokens of the shortest and longest chat, and how many
IMAGES = 8  # of each chat with images, of 512 x 512 pixels: 256 rows each
ROWS = re.compile(r"(?<=<!-- answers -->\n).*(?=<!-- end -->)", re.DOTALL)
# By the name of the model's folder in the recipes: a configuration class of transformers, and what differs from it.
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("families.json").read_text())
_QWEN3_VL = FAMILIES["Qwen3-VL-8B-Instruct"][1]
_QWEN3_VL["text_config"] = {**QWEN3_8B, **_QWEN3_VL["text_config"]}
del _QWEN3_VL["text_config"]["model_type"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes; default: all")
    parser.add_argument("--check", action="store_true", help="compare with what is written, and write nothing")
    flags = parser.parse_args()
    names = flags.names or sorted(path.stem for path in FOLDER.glob("*.toml"))
    wrong = 0
    with made_folder() as folder:
        for name in names:
            row = row_of(name, folder)
            written = read_rows(PAGE.read_text(encoding="utf-8"))
            wrong += written.get(name) != row
            print(row, flush=True)
            if not flags.check:
                write_rows(written | {name: row})
    print(f"{plural(wrong, 'row')} of {len(names)} {'differ from the page' if flags.check else 'written anew'}")
    return int(flags.check and wrong > 0)


@contextlib.contextmanager
def made_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = Path.cwd()
        cache = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)
            os.environ.pop("XDG_CACHE_HOME")
            os.environ |= {} if cache is None else {"XDG_CACHE_HOME": cache}


def row_of(name: str, folder: Path) -> str:
    answers = [answer_of(name, folder, gpu, count) for gpu, _ in GPUS for count in COUNTS]
    return f"| [{name}]({name}.toml) | {' | '.join(map(cell, answers))} |"


def cell(answer: Mapping[str, Any]) -> str:
    if not answer["fits"]:
        return "no"
    host = f" + {gib(answer['host'])} of the host" * (answer["host"]["total"] >= 1 << 28)
    return f"{gib(answer['device'])}{host}, {answer['step_seconds']:.3g} s"


def gib(sizes: Mapping[str, int]) -> str:
    return f"{sizes['total'] / 2**30:.0f} GiB"


def answer_of(name: str, folder: Path, gpu: str, count: int) -> dict[str, Any]:
    from longspan.cli.main import main as longspan

    recipe = FOLDER / f"{name}.toml"
    model = re.search(r'^path = "(.*)"', recipe.read_text(encoding="utf-8"), re.MULTILINE)
    assert model is not None
    make_model(folder / model.group(1))
    chats = make_chats(folder, name.rpartition("-")[2], images="-vl-" in name)
    words = ["train", str(recipe), "--dry-run", "--json", "--world", str(count), "--device", "cpu"]
    words += ["--run.machine", gpu, "--data.path", str(chats)]
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = longspan(words)
    if status:
        raise RuntimeError(f"longspan {' '.join(words)} ended with {status}: {err.getvalue()}")
    return json.loads(out.getvalue())


def make_model(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    import transformers

    from longspan.corpus.tokenizer import train_tokenizer
    from longspan.model.presets import preset_config

    folder.mkdir(parents=True)
    if folder.name in FAMILIES:
        kind, values = FAMILIES[folder.name]
        config = getattr(transformers, kind)(**values)
    else:
        config = preset_config(folder.name.lower())
    if "VL" in folder.name:
        ids = _image_processor(folder)
        config = type(config)(**values, **ids)
    else:
        train_tokenizer(["a tokenizer of letters"], 300).save_pretrained(folder)
    config.save_pretrained(folder)


def _image_processor(folder: Path) -> dict[str, int]:
    """Write the tokenizer and processor of Qwen3-VL, patches of 16 merged by 2; the ids of its special tokens."""
    from transformers import AutoTokenizer

    from tests.corpus.images.folders import qwen3_folder

    qwen3_folder(folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        text = (folder / name).read_text().replace('"patch_size": 4', '"patch_size": 16')
        (folder / name).write_text(text.replace("4096", str(1 << 24)).replace(": 64", ": 65536"))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokens = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    tokens |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in tokens.items()}


def make_chats(folder: Path, size: str, *, images: bool) -> Path:
    """Rows of chats whose lengths are drawn evenly in their logarithm, one in twelve the longest."""
    path = folder / f"chats-{size}{'-images' * images}.jsonl"
    if path.is_file():
        return path
    shortest, longest, count = MADE[size]
    draw = Random(0)
    lengths = [
        longest if i % 12 == 0 else round(shortest * (longest / shortest) ** draw.random()) for i in range(count)
    ]
    rows: Sequence[dict[str, Any]]
    if images:
        from PIL import Image

        Image.new("RGB", (512, 512)).save(folder / "image.png")
        rows = [_chat_with_images(max(n, 4096)) for n in lengths]
    else:
        rows = [{"input_ids": [5] * n} for n in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _chat_with_images(tokens: int) -> dict[str, Any]:
    shown: list[dict[str, str]] = [{"type": "image"}] * IMAGES
    text = "x" * (tokens - IMAGES * 260 - 80)
    messages = [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}]
    return {"messages": [*messages, {"role": "assistant", "content": "a word"}], "images": ["image.png"] * IMAGES}


def read_rows(page: str) -> dict[str, str]:
    return {name: line for line in page.splitlines() for name in re.findall(r"^\| \[([\w.-]+)\]", line)}


def write_rows(rows: Mapping[str, str]) -> None:
    heads = [f"{count} × {title}" for _, title in GPUS for count in COUNTS]
    lines = [
        f"| recipe | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
        *(rows[name] for name in sorted(rows)),
    ]
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(ROWS.sub(lambda _: "\n".join(lines) + "\n", page), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
