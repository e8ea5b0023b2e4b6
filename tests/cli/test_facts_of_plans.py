"""`train --dry-run` and `plan --data` decide by a run's own facts: its documents, its hosts, the rows that it keeps."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.cli.main import main
from longspan.cli.plans.gpu_run import GpuRun
from longspan.cli.plans.gpus import choose_gpus
from longspan.comm import World
from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.data.step_order import choose_held_out_texts
from longspan.layout import Layout
from longspan.resolve.facts import Facts
from longspan.resolve.kept_rows import FILE, SlotRows, keys_that_decide_rows
from longspan.resolve.resolved import Resolved
from longspan.resolve.run_cost import set_node_size
from longspan.run import set_up
from longspan.testing import backend
from longspan.train.run_model.load import read_model_configuration
from tests.model.stock import without_trials
from tests.run.runs.test_lora_run import write_base

RANKS = 3
TEXTS = 12
LONGEST = 2000
KEYS: dict[str, Any] = {
    "context.planner": "fixed",
    "context.context_parallel_size": 1,
    "context.max_tokens_per_slot": "auto",
    "evaluation.documents": 1,
    "evaluation.context_parallel_size": "auto",
    "train.steps": 6,
    "train.tokens_per_step": 900,
    "optimizer.lr": 1e-4,
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of a run whose longest document is held out."""
    folder = tmp_path_factory.mktemp("facts")
    (held_out,) = choose_held_out_texts(TEXTS, None, None, 1, seed=0)
    lengths = [LONGEST if text == held_out else 100 + 10 * text for text in range(TEXTS)]
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "a" * n}) + "\n" for n in lengths))
    base = write_base(folder / "base", max_position_embeddings=4096)
    return KEYS | {"model.config": str(base), "data.path": str(rows)}


def resolve_as_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Resolved:
    """What the run's own set-up decides with, on GPUs as a dry run has them."""
    gpu_run = GpuRun.with_model(config, choose_gpus(config, RANKS, on_gpus=False))
    resolved = list[Resolved]()

    def resolve(config: RunConfig, facts: Facts, world: object, log: object, decide: Callable[..., Resolved]) -> Any:
        of_gpus = {"home": gpu_run.home, "machine": gpu_run.gpus.machine, "budget": gpu_run.budget, "gpu": True}
        resolved.append(decide(config, replace(facts, **of_gpus)))

    monkeypatch.setattr(set_up, "resolve_on_ranks", resolve)
    with without_trials(), World(Layout(1), backend=backend()) as world:
        world.node_size = RANKS
        of_run, _, data = set_up.open_run_documents(config, None, {}, world, lambda line: None)
        model = read_model_configuration(of_run, of_run.data.vocab_size)
        set_up.resolve_run(of_run, data, model, world, lambda line: None, done=0)
    return resolved[0]


def check_as_run(answer: dict[str, Any], resolved: Resolved) -> None:
    memory = resolved.memory
    assert memory is not None
    assert answer["keys"]["context.max_tokens_per_slot"] == resolved.config.context.max_tokens_per_slot
    assert answer["keys"]["context.cp_comm_type"] == resolved.config.context.cp_comm_type
    assert (answer["device"], answer["host"]) == (memory.device.to_json(), memory.host.to_json())
    assert answer["checkpoint_policies"] == list(memory.checkpoint_policies)
    assert answer["reasons"]["degrees"] == list(resolved.reasons.degrees) != []


@pytest.mark.parametrize("kept", [None, (6000, 6000), (2500, 5000)], ids=["chosen", "kept", "halved"])
def test_a_run_and_its_dry_run_decide_alike(
    kept: tuple[int, int] | None,
    keys: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = keys | {"run.dir": str(tmp_path / "run")}
    config = load_config(None, keys)
    if kept:
        of_run = set_node_size(config, RANKS)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / FILE).write_text(
            json.dumps(vars(SlotRows(*kept, ranks=RANKS, keys=keys_that_decide_rows(of_run))))
        )
    flags = [word for name, value in keys.items() for word in (f"--{name}", str(value))]
    answers = list[dict[str, Any]]()
    for verb in ("train --dry-run --device cpu --world", "plan --gpu h200 --gpus"):
        assert main([*verb.split(), str(RANKS), *flags, "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert (tmp_path / "run" / FILE).exists() == (kept is not None), "a question writes nothing"
    resolved = resolve_as_run(config, monkeypatch)
    rows = resolved.config.context.max_tokens_per_slot
    assert isinstance(rows, int) and (rows == kept[0] if kept else rows >= LONGEST)
    for answer in answers:
        check_as_run(answer, resolved)
