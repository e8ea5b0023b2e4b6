"""`longspan train` over rows with images and videos: pixels are read ahead by who encodes them; losses."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import Qwen2_5_VLConfig

from longspan.cli.eval import main as eval_main
from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.corpus.image_documents import ImageReader
from longspan.corpus.images.image_file import ImageFile
from longspan.data.corpus_documents import Corpus
from longspan.data.run_order import make_step_order
from longspan.data.step_order import StepOrder
from longspan.run.metrics import read_metrics
from longspan.testing import run_ranks
from tests.corpus.images.folders import qwen_folder, write_images, write_rows
from tests.train.small import train_rank

SETTINGS: dict[str, Any] = {
    "model.dtype": "float64",
    "data.max_document_tokens": 0,
    "evaluation.documents": 4,
    "context.context_parallel_size": 2,
    "context.max_tokens_per_slot": 96,
    "evaluation.context_parallel_size": 2,
    "evaluation.max_tokens_per_slot": 96,
    "train.steps": 2,
    "train.tokens_per_step": 160,
    "optimizer.lr": 3e-3,
    "optimizer.warmup_steps": 1,
    "evaluation.every": 1,
    "run.timeout_seconds": 60.0,
}
ANSWER = {"role": "assistant", "content": "yes"}


def write_model(folder: Path) -> Path:
    qwen_folder(folder)
    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text |= {"intermediate_size": 48, "vocab_size": 264, "rope_parameters": rope, "initializer_range": 0.1}
    vision = {"hidden_size": 16, "depth": 2, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1]}
    ids = {"image_token_id": 260, "video_token_id": 261, "vision_start_token_id": 258, "vision_end_token_id": 259}
    Qwen2_5_VLConfig(
        text_config=text | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        vision_config=vision,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        **ids,
    ).save_pretrained(folder)
    return folder


def config_of(folder: Path) -> RunConfig:
    names, rows = write_images(folder / "data", [(16, 16), (8, 24), (20, 33), (24, 8)]), list[dict[str, Any]]()
    for i in range(24):
        shown = [names[(i + k) % 4] for k in range(i % 3)]
        question = {"role": "user", "content": "<image> and " * len(shown) + "so?" * (1 + i % 4)}
        rows.append({"messages": [question, ANSWER]} | ({"images": shown} if shown else {}))
    paths = {
        "model.config": str(write_model(folder / "model")),
        "data.path": str(write_rows(folder / "data" / "rows.jsonl", rows)),
        "run.dir": str(folder / "run"),
    }
    return load_config(None, SETTINGS | paths)


class Reads(NamedTuple):
    """Of one rank's run: images that it gave its encoder, had begun to read before that, and whose pixels it opened,
    and the steps whose documents it selected.
    """

    given: int
    ahead: int
    opened: int
    selected: list[int]


def train_and_count(rank: int, config: RunConfig, ranks: int) -> Reads:
    given, ahead, opened, selected = list[Any](), list[Any](), list[Any](), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        note(patch, ImageReader, "_read_input", lambda _, number: given.append(number))
        read_ahead = ImageReader.read_ahead  # takes what can be read once
        patch.setattr(ImageReader, "read_ahead", lambda self, n: ahead.extend(n := [*n]) or read_ahead(self, n))
        note(patch, ImageFile, "load", opened.append)
        note(patch, StepOrder, "select", lambda _self, _corpus, step: selected.append(step))
        train_rank(rank, config, ranks)
    return Reads(len(given), len(ahead), len(opened), selected)


def note(patch: pytest.MonkeyPatch, owner: Any, name: str, write: Any) -> None:
    work = getattr(owner, name)
    patch.setattr(owner, name, lambda *values: (write(*values), work(*values))[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[Reads]]:
    config = config_of(tmp_path_factory.mktemp("images"))
    return config, run_ranks(train_and_count, 2, config, 2, timeout=200)


def test_a_rank_reads_its_images_alone_and_ahead(trained: tuple[RunConfig, list[Reads]]) -> None:
    config, (first, second) = trained
    corpus = Corpus(Path(config.run.dir) / "corpus")
    order, images = make_step_order(config, corpus), corpus.images
    assert images is not None and isinstance(order, StepOrder)
    steps = sum(len(images.images_of_document(d)) for step in range(2) for d in order.documents_of_step(step))
    held_out = sum(len(images.images_of_document(d)) for d in order.evaluation)
    evaluations = 3  # after the first step, and after the last at two degrees
    once = steps + evaluations * held_out
    assert once <= first.given + second.given <= once + 4 + evaluations < 1.5 * once
    assert second.opened == second.given > 0 and first.opened == first.given
    assert 0 < first.ahead <= first.given and 0 < second.ahead <= second.given


def test_the_documents_of_a_step_are_selected_once(trained: tuple[RunConfig, list[Reads]]) -> None:
    assert all(rank.ahead and rank.selected == [0, 1] for rank in trained[1])


def test_saved_folders_have_the_processor_and_are_evaluated(
    trained: tuple[RunConfig, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(trained[0].run.dir)
    assert (folder / "model" / "preprocessor_config.json").is_file()
    layout = ["--world", "2", "--encoder.tp", "2", "--evaluation.context_parallel_size", "1"]
    assert eval_main([str(folder), *layout, "--json", "--device", "cpu"]) == 0
    evaluated = json.loads(capsys.readouterr().out)["eval_loss"]
    losses = [float(row["eval_loss"]) for row in read_metrics(folder / "metrics.jsonl") if "eval_loss" in row]
    assert evaluated == pytest.approx(losses[1], rel=1e-6)  # of the last step; others are at further degrees
