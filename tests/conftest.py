"""Options of the whole suite: the same test files run with gloo on CPUs and with NCCL on GPUs."""

import gc
import os
import signal
import tempfile
from collections.abc import Generator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from longspan.launch import fork_server
from tests.outcomes import Resumed
from tests.over_nccl import PARTS, mark

PRELOAD = (  # what most test files import, beside what runs of users do
    "pytest",
    "hypothesis",
    "longspan.testing",
    "longspan.doctor.proof",
    "longspan.corpus.run_corpus",
    "longspan.cli.main",
    "longspan.cli.train",
    "longspan.cli.eval",
    "longspan.cli.export",
    "longspan.cli.plan",
    "tests.model.stock",
    "tests.model.experts.moe_models",
    "tests.model.deep",
    "tests.train.small",
    "tests.attention.cases",
    "tests.model.lora.adapted",
    "tests.mutation",
    "tests.parity",
    "tests.reference",
    "longspan.data.shared_prefixes",
    "longspan.model.frozen.frozen_weights",
    "longspan.model.tensor_parallel.split_model",
    "longspan.train.terms.document_loss",
    "longspan.train.terms.micro_batch_loss",
    "torch.utils.serialization.config",
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.qwen3_next.modeling_qwen3_next",
    "transformers.models.qwen2_5_vl.configuration_qwen2_5_vl",
    "transformers.models.gemma3.configuration_gemma3",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.integrations.mistral",
    "transformers.convert_slow_tokenizer",
    "tokenizers.trainers",
    "numpy.ma",
    "peft",
    "tests.preload",
)

# The longest first: a worker that begins one last is waited for. The others come in the order of their folders.
LONGEST = (
    "cli/test_plan_gpus.py",
    "test_docs.py",
    "run/test_run.py",
    "run/runs/test_rows_run.py",
    "run/runs/test_lora_run.py",
    "hf/test_trainer.py",
    "resolve/test_memory.py",
    "resolve/test_resolved.py",
    "run/runs/test_mtp_run.py",
    "run/runs/test_frozen_run.py",
    "run/runs/test_scores_run.py",
    "run/runs/test_images_run.py",
    "run/test_eval_sets.py",
    "train/multimodal/test_oracle.py",
    "train/steps/test_gradients.py",
    "train/steps/test_matrix.py",
    "train/steps/test_pipelined.py",
    "train/steps/test_step.py",
    "train/optim/test_offload_over_ranks.py",
    "train/own_loss/test_exact.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend", choices=["gloo", "nccl"], default="gloo", help="what distributed tests open their worlds with"
    )
    parser.addoption(
        "--ranks-per-gpu", type=int, default=1, help="with --backend nccl: ranks that share a GPU, over sockets"
    )
    parser.addoption("--part", choices=list(PARTS), help="of the tests marked nccl, those of this part")
    parser.addoption(
        "--resume", type=Path, metavar="FILE", help="write outcomes to this file, and leave out what passed there"
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ["LONGSPAN_TEST_BACKEND"] = config.getoption("--backend")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, also in runs that tests start
    # One thread for arithmetic in each process, set before torch is imported. Two pytest workers with a thread for each
    # core would spend most of their time waiting for those threads, as most tensors have a few kilobytes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    fork_server.PRELOAD = (*fork_server.PRELOAD, *PRELOAD)
    # What runs keep for other runs goes to a folder of this session, for a test is to see what it makes itself.
    folder = tempfile.TemporaryDirectory(prefix="longspan-cache-")
    os.environ["XDG_CACHE_HOME"] = folder.name
    config.add_cleanup(folder.cleanup)
    if config.getoption("--backend") == "nccl":
        from longspan import testing
        from tests.launch.rank_pool import RANKS_PER_GPU, run_on_gpus

        os.environ[RANKS_PER_GPU] = str(config.getoption("--ranks-per-gpu"))
        testing.run_on_gpus = run_on_gpus
    if (path := config.getoption("--resume")) is not None:
        config.pluginmanager.register(Resumed(path))


@pytest.fixture
def token_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where runs of this test keep their tokens, with those of no other test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "longspan" / "corpora"


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What test files import is no garbage: looking for some takes a quarter of the time of importing them."""
    gc.disable()
    try:
        _import_from_another_file_on(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_from_another_file_on(config: pytest.Config) -> None:
    """Pytest compiles assertions of its own, for half of the time of a collection, and keeps them in files. Each worker
    begins with other tests and finds those of the other workers there.
    """
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if not worker or config.args != config.getini("testpaths"):
        return
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in files[first:] + files[:first]:
        with suppress(Exception, pytest.skip.Exception):  # a collection says it
            import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    mark(items, whole_suite=config.args == config.getini("testpaths"))
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if part := config.getoption("--part"):
        markers = {item: item.get_closest_marker("nccl") for item in items}
        of_part = [item for item, marker in markers.items() if marker and marker.args == (part,)]
        config.hook.pytest_deselected(items=[item for item in items if item not in of_part])
        items[:] = of_part
