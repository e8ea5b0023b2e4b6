"""Configuration: what is read, what is refused and how, before any process exists."""

import runpy
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from longspan.attention import PATTERNS
from longspan.cli.train_flags import OFTEN
from longspan.config.defaults import resolve_defaults
from longspan.config.dtypes import compute_dtype
from longspan.config.file import TABLES, config_keys, load_config, read_file, to_toml
from longspan.config.keys import section_keys
from longspan.config.plan_section import EvalConfig
from longspan.config.sections import ModelConfig, RunConfig, SourceConfig
from longspan.config.text_values import BestFigure
from longspan.data.step_order import StepOrder
from longspan.errors import ConfigError, LayoutError
from longspan.layout import Layout
from longspan.plan import Cost, Machine
from longspan.plan.check import COMM_TYPES
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.resolve.facts import Facts
from longspan.resolve.planner_config import PlannerConfig, plan_steps_ahead
from longspan.resolve.run_cost import memory_settings_of_run
from longspan.resolve.ways import Way, degrees_to_compare
from longspan.run.checks import check_config, check_longest_training_document, refuse_encoder_without_images

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
REFERENCE_PAGE = runpy.run_path(str(PAGE.parent / "site/configuration.py"))["reference_page"]()


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_the_first_example_says_what_the_demo_has_without_it() -> None:
    assert load_config(EXAMPLES / "first.toml") == load_config() == resolve_defaults(RunConfig())
    given = read_file(EXAMPLES / "first.toml")
    limits = {f"{limit}_dynamic_context_parallel_size": least for limit, least in (("min", 1), ("max", 0))}
    given = replace(given, evaluation=replace(given.evaluation, **limits))  # none of the demo's plans is dynamic
    given = replace(given, model=replace(given.model, path="folder"), encoder=replace(given.encoder, trainable="all"))
    all_keys = load_config(EXAMPLES / "first.toml", {"model.path": "folder"})
    assert given == all_keys, "every key of the demo is in the file"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_every_example_is_possible_on_four_ranks(path: Path) -> None:
    config = load_config(path)
    assert check_config(config, 4).slots == 4 // (config.parallel.tp * config.parallel.pp)


CHANGED: dict[str, object] = {
    "data.path": 'a "quoted" \\ päth\n\x7f',
    "context.cp_comm_type": ["p2p", "all_gather"],
    "context.hierarchical_context_parallel_sizes": 4,
    "optimizer.lr": 1e-05,
    "optimizer.weight_decay": 1,
    "parallel.reshard_after_forward": False,
    "optimizer.arguments": ["amsgrad=true", 'x="a b"'],
}


def test_toml_there_and_back(tmp_path: Path) -> None:
    changed = load_config(None, CHANGED)
    for config in (changed, load_config(None, {"model.path": "x"})):  # which leaves its plans open
        assert load_config(written(tmp_path, to_toml(config))) == config
    assert changed.optimizer.weight_decay == 1.0 and isinstance(changed.optimizer.weight_decay, float)
    for word, choice in (("true", "full"), ("false", "none"), ('"selective"', "selective")):  # what became a choice
        text = f"[train]\nactivation_checkpointing = {word}\n"
        assert load_config(written(tmp_path, text)).train.activation_checkpointing == choice


def test_keys_are_those_of_the_dataclasses() -> None:
    keys = {f"{section}.{key}" for section, keys in RunConfig().tables().items() for key in keys}
    assert set(config_keys()) == keys - {*TABLES}


READ = [
    ('[data]\nread = "rows"\n[train]\nsteps = 3', r"unknown key data.read in .*config.toml: "),  # of an early version
    ("[trian]\nsteps = 1", r"unknown section \[trian\] in .*config.toml: did you mean 'train'"),
    ("[train]\nstep = 1", r"unknown key train.step in .*config.toml: did you mean 'train.steps'"),
    ("[train]\nmax_tokens_per_slot = 1", r"unknown key train.max_tokens_per_slot .*'context.max_tokens_per_slot'"),
    ("steps = 1", r"unknown section \[steps\].*'train.steps'"),
    ("train = 1", r"train is 1 .*it is a section"),
    ("[train]\nsteps = 'ten'", r"train.steps is 'ten' in .*; it must be an integer"),
    ("[train]\nsteps = true", r"train.steps is True .* an integer"),
    ("[optimizer]\nlr = '6e-3'", r"optimizer.lr is '6e-3' .* a number"),
    ("[optimizer]\narguments = 'momentum=0.9'", r"it must be a list of strings"),
    ("[data]\nrename_columns = { messages = 3 }", r"data.rename_columns is \[3\] in .*; it must be a list of strings"),
    ("[model]\ndtype = 'float16'", r"model.dtype is 'float16' .* 'float32', 'float64', 'bfloat16'"),
    (
        "[context]\ndynamic_context_parallel = true",
        r'context.dynamic_context_parallel .*: here it is context.planner = "dynamic"$',
    ),
    ("[data]\nsample_packing = true", r"unknown key data.sample_packing in .*: leave it out, for plans pack whole doc"),
    ("[context]\ncp_comm_type = 2", r"context.cp_comm_type is 2 .* a string or a list of strings"),
    ("[context]\ncp_comm_type = []", r"context.cp_comm_type is \[\]"),
    ("[context]\nhierarchical_context_parallel_sizes = [2, '2']", r"an integer or a list of integers"),
    ("[context]\npartition = 'striped'", r"context.partition is 'striped' .* 'zigzag', 'contiguous'"),
    ("[parallel]\nsequence_parallel = 1", r"true or false"),
    ("[train\nsteps = 1", r"is not TOML: .*line 1"),
    (
        '[[evaluation.sets]]\nname = "books"\npth = "x"',
        r"unknown key evaluation.sets.books.pth in .*: did you mean 'path'",
    ),
    ("[[evaluation.sets]]\neval_every = 2", r"unknown key evaluation.sets.1.eval_every in .*: did you mean 'every'"),
    (
        '[[evaluation.sets]]\nname = "books"\nevery = "often"',
        r"evaluation.sets.books.every is 'often' in .*; it must be an integer",
    ),
    ('[evaluation.sets]\nname = "books"', r"evaluation sets are tables of an array: write \[\[evaluation.sets\]\]"),
    ("[evaluation]\nsets = 3", r"evaluation.sets is 3 in .*write \[\[evaluation.sets\]\]"),
    # Former keys of ours are unknown keys.
    ('[[eval]]\nname = "books"', r"unknown section \[eval\] in .*: known: model, data, "),
    ("[train]\nlr = 1.0", r"unknown key train.lr in .*: did you mean 'optimizer.lr'"),
    ('[train]\nfloat8 = "rows"', r"train.float8 is 'rows' in .*'rowwise' \(did you mean 'rowwise'"),
    ('[train]\nfloat8 = "rowise"', r"train.float8 is 'rowise' in .*'rowwise' \(did you mean 'rowwise'"),
    ("[train]\nplan_memry = false", r"unknown key train.plan_memry in .*: did you mean 'train.plan_memory'"),
]


@pytest.mark.parametrize(("text", "message"), READ, ids=[text.replace("\n", " ") for text, _ in READ])
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, text))


def test_all_that_is_wrong_in_a_file_is_named_at_once(tmp_path: Path) -> None:
    text = '[train]\nstep = 1\n[optimizer]\nlr = "x"\n[foo]\n[[data.sources]]\npth = "a"\n'
    text += '[[evaluation.sets]]\nnme = "x"\n[[evaluation.sets]]\nduty = 1\n'
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "a.toml")
    parts = str(refused.value).split("; ")
    begins = ("unknown key train.step in ", "optimizer.lr is 'x' in ", "it must be", "unknown section [foo]")
    begins += (
        "unknown key data.sources[0].pth",
        "unknown key evaluation.sets.1.nme",
        "unknown key evaluation.sets.2.duty",
    )
    assert len(parts) == len(begins) and all(map(str.startswith, parts, begins))
    assert parts[0].endswith("did you mean 'train.steps'?")


def test_a_missing_file_and_an_unknown_override(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none.toml: No such file .*; give a TOML"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "sft.toml").touch()
    with pytest.raises(ConfigError, match=r"stf.toml: No such file or directory; did you mean 'sft.toml'\?$"):
        load_config(tmp_path / "stf.toml")
    (tmp_path / "sfd.toml").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*sfd.toml: Is a directory; did you mean 'sft.toml'\?$"):
        load_config(tmp_path / "sfd.toml")
    (tmp_path / "sft.toml").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*sfd.toml: Is a directory; give a TOML file$"):
        load_config(tmp_path / "sfd.toml")
    with pytest.raises(ConfigError, match=r"unknown key run.dirr in the overrides: did you mean 'run.dir'"):
        load_config(None, {"run.dirr": "x"})


ONE = {"evaluation.documents": 0, "context.context_parallel_size": 1, "context.max_tokens_per_slot": 0}
DYNAMIC = {"context.planner": "dynamic", "evaluation.context_parallel_size": 1}
LEAST, SIZES = "context.min_dynamic_context_parallel_size", "context.hierarchical_context_parallel_sizes"

BOOKS = {"name": "books", "path": "books"}
SETS: list[tuple[dict[str, object], str]] = [
    ({"context_parallel_size": 3}, r"evaluation.sets.books.context_parallel_size 3 does not divide 4 .*1 or 2 or 4"),
    (
        {"cp_comm_type": "p2p"},
        r"unknown key evaluation.sets.books.cp_comm_type in .*: did you mean 'evaluation.cp_comm_type', wh",
    ),
    (
        {"context_parallel_size": 1, "max_document_tokens": 4000},
        r"books.context_parallel_size 1 and evaluation.max_tokens_per_slot 2048 do not suit evaluation.sets.books.max",
    ),
    ({"every": -2}, r"evaluation.sets.books.every is -2; it must be at least 0"),
    ({"max_document_tokens": 1}, r"evaluation.sets.books.max_document_tokens is 1; a document of one token"),
]
IMPOSSIBLE = [  # keys, and what is said of them on 4 ranks
    ({"train.steps": 0}, r"train.steps is 0; it must be at least 1"),
    ({"train.steps": -1}, r"train.steps is -1; it must be at least 1"),  # no number says that a key is not given
    (
        {"train.offload_weights": True, "context.mode": "free"},
        r"offload_weights is True, which needs context.mode 'auto'",
    ),
    ({"train.offload_weights": True, "parallel.pp": 2}, r"needs parallel.pp 1, and parallel.pp is 2; set it, or leave"),
    ({"optimizer.lr": 0.0}, r"optimizer.lr is 0.0; it must be above 0"),
    (
        {"optimizer.weight_decay": float("inf")},
        r"optimizer.weight_decay is inf; it must be a finite number, at least 0",
    ),
    ({"train.epochs": float("nan")}, r"train.epochs is nan; it must be a finite number, at least 0"),
    ({"optimizer.min_lr_ratio": 1.5}, r"optimizer.min_lr_ratio is 1.5; it must be at least 0, at most 1"),
    (
        {"model.compute_dtype": "float64"},
        r'float64 has 53 .* in float32 24, .* use model.dtype = "float64", or model.com',
    ),
    ({"model.compute_dtype": "bfloat16", "model.dtype": "float64"}, r'bfloat16 has 8 .* use model.dtype = "float32"'),
    ({"optimizer.arguments": ("betas=[0.9, 1.0]",)}, "Invalid beta parameter at index 1: 1.0; correct"),
    ({"optimizer.class": "adam"}, r"optimizer.class is 'adam'; use adamw, muon, sgd, or the dotted name"),
    ({"optimizer.arguments": ("foo=1",)}, r"'adamw' has no argument 'foo'; known: betas, eps, amsgrad"),
    ({"optimizer.arguments": ("foreach=true",)}, r"'adamw' refuses its parameters or arguments .*fused"),
    ({"optimizer.class": "torch.optim.Rprop", "optimizer.weight_decay": 0.1}, r"knows no weight decay"),
    (
        {"optimizer.stochastic_rounding": True},
        r"needs model.dtype 'bfloat16', and model.dtype is 'float32'; set it, or",
    ),
    (
        {"optimizer.stochastic_rounding": True, "model.dtype": "bfloat16", "optimizer.class": "sgd"},
        r"rounds updates of adamw .* is 'sgd' with \[\]",
    ),
    (
        {"train.float8": "rowwise", "model.dtype": "float64"},
        r'train.float8 is "rowwise", next to arithmetic in bfloat16, an',
    ),
    ({"train.float8": "rowwise", "model.compute_dtype": "float32"}, r'compute_dtype "float32"; use model.compute_dtyp'),
    ({"train.float8": "tensor"}, r"train.float8 is 'tensor'"),
    (
        {"optimizer.lr_schedule": "cos"},
        r"lr_schedule is 'cos'; give 'cosine', .*, 'wsd' or 'wsd:NUMBER' \(at least 1\)",
    ),
    ({"optimizer.lr_schedule": "cosine:5"}, r"lr_schedule is 'cosine:5'; give"),
    ({"optimizer.lr_schedule": "wsd:0.5"}, r"lr_schedule is 'wsd:0.5'; give"),
    ({"optimizer.lr_schedule": "wsd:2.5"}, r"lr_schedule is 'wsd:2.5'; give whole steps, as in 'wsd:200'"),
    ({"train.loss_arguments": ("center_rewards_coefficient=-1",)}, "coefficient=-1; it must be a number at least 0"),
    ({"data.vocab_size": 256}, r"data.vocab_size is 256; it must be at least 257"),
    ({"data.max_document_tokens": 1}, r"predicts nothing"),
    ({"run.timeout_seconds": 0.0}, r"run.timeout_seconds is 0.0"),
    (
        {"checkpoint.save_signals": ["SIGUSR1", "SIGTERM"]},
        r"'SIGTERM'\] .*; it must be a list of 'SIGHUP', 'SIGUSR1', 'SIGUSR2'",
    ),
    (
        {"checkpoint.preempted_exit_code": 256},
        r"checkpoint.preempted_exit_code is 256; it must be at least 0, at most 255",
    ),
    ({"model.preset": "qwen-tiny"}, r"model.preset is 'qwen-tiny'; did you mean 'qwen3-tiny'"),
    ({"model.preset": "llama-tiny", "model.path": "x"}, r"model.path = 'x' and model.preset = 'llama-tiny' name more"),
    ({"model.rope_scaling": "dynamic"}, r"model.rope_scaling is 'dynamic'; give '', 'yarn' or 'yarn:NUMBER'"),
    ({"model.rope_scaling": ":2"}, r"rope_scaling is ':2'; give '', 'yarn' or 'yarn:NUMBER' \(above 1\), 'linear' or"),
    ({"model.rope_scaling": "yarn:0.5"}, r"model.rope_scaling is 'yarn:0.5'; .* \(above 1\)"),
    ({"context.context_parallel_size": 3}, r"context.context_parallel_size 3 does not divide 4 slots \(4 ranks"),
    ({"context.max_tokens_per_slot": 512}, r"max_tokens_per_slot 512 .*max_document_tokens 2048 .*2048.*1024"),
    ({"evaluation.max_tokens_per_slot": 500}, r"evaluation.max_tokens_per_slot 500 do not suit .*2000"),
    ({"context.planner": "dynamic", LEAST: 5}, rf"^{LEAST} 5 is above the 4 slots; use at most 4$"),
    ({"evaluation.planner": "dynamic", LEAST: 5}, rf"^{LEAST} 5 is above the 4 slots; use at most 4$"),
    ({"context.cp_comm_type": "a2a+p2p", SIZES: (4, 2)}, rf"^{SIZES} \(4, 2\) multiply to 8, but the group has"),
    ({"context.planner": "pad"}, r"context.planner is 'pad'; did you mean 'padded'\?, or a function of your own"),
    ({"context.cp_comm_type": "ring"}, r"context.cp_comm_type is 'ring'; known: p2p"),
    ({"context.cp_comm_type": ("p2p", "al_gather")}, r"'al_gather'; did you mean 'all_gather'"),
    ({"context.attention_kernel": "fa5"}, r"context.attention_kernel is 'fa5'; did you mean 'fa4'"),
    ({"context.mode": "free", "parallel.ep": 2}, r"context.mode is 'free', which needs parallel.ep 1, and .* is 2"),
    ({"context.max_tokens_per_slot": "most"}, r"max_tokens_per_slot is 'most'; give a number, or .auto."),
    ({"train.activation_checkpointing": "none+host"}, "must be one of 'auto', 'none', 'full', 'full.host', "),
    (
        {"parallel.pp": 2, "evaluation.context_parallel_size": 4},
        r"size 4 does not divide 2 slots \(4 ranks / tp 1 / pp 2",
    ),
    ({"parallel.vpp": 2}, r"parallel.vpp is 2, which needs parallel.pp at least 2, and parallel.pp is 1; set"),
    ({"lora.alpha": 8.0}, "lora.rank is 0"),
    ({"lora.rank": 4, "lora.dropout": 0.1, "parallel.tp": 2}, "lora.dropout is 0.1"),
    ({"lora.rank": 4, "lora.dropout": 1.0}, "below 1"),
    (
        {"lora.rank": 4, "model.dtype": "bfloat16", "optimizer.stochastic_rounding": True},
        "needs lora.rank 0, and .* is 4",
    ),
    ({"mtp.num_layers": 1, "mtp.train_whole": True}, "mtp.train_whole is True, .* lora.rank is 0"),
    ({"mtp.num_layers": 1, "mtp.weights": "nowhere"}, "'nowhere', which is no folder"),
    ({"encoder.tp": 3}, r"encoder\.tp is 3, and there are 4 ranks; use 1, 2, 4"),
    ({"encoder.lr": 0.1, "encoder.trainable": "none"}, r"encoder.lr is 0.1, which needs encoder.trainable 'all' or"),
    ({"train.profile_steps": (10, 0)}, r"train.profile_steps is \(10, 0\); it must be at least 1"),
    ({"checkpoint.keep_best": "loss"}, "is 'loss'; give a figure .* as metrics.jsonl has it, such as eval_loss"),
    ({"checkpoint.keep_best": "eval_loss:best"}, "is 'eval_loss:best'; give a figure"),
    (
        {"checkpoint.keep_best": "code/eval_loss"},
        "names eval_loss of the set 'code', which the run has not; its sets: none",
    ),
    ({"train.router_z_loss_coef": -1.0}, r"train.router_z_loss_coef is -1.0"),
    ({"parallel.ep": 4, "parallel.dp_replicate": 2}, r"parallel.ep 4 does not divide the 2 slots of each"),
    (
        {"parallel.sequence_parallel": True},
        r"sequence_parallel is True, which needs parallel.tp at least 2, and .* is 1",
    ),
    ({"evaluation.sets": [{"path": "a"}]}, r"table 1 of \[\[evaluation.sets\]\] has name = ''; give one of letters"),
    ({"evaluation.sets": [{"name": "books"}]}, r"evaluation.sets.books.path is empty"),
    ({"evaluation.sets": [BOOKS, BOOKS | {"path": "b"}]}, r"2 of 2 tables \[\[evaluation.sets\]\] have name = 'books'"),
    *(({"evaluation.sets": [BOOKS | table]}, words) for table, words in SETS),
]
ON_OTHER_RANKS = [
    (3, {"parallel.tp": 2}, r"3 ranks are not divisible by tp 2 x pp 1"),
    (3, {}, r"context_parallel_size 2 does not divide 3 slots .*use 1 or 3, or start a multiple of 2 processes"),
    (1, {}, r"context_parallel_size 2 does not divide 1 slot .*--world 2"),
    (
        1,
        DYNAMIC,
        r"^context.max_tokens_per_slot 1024 does not suit data.max_document_tokens 2048 on 1 rank: .* of more",
    ),
]


ALL = [*((4, *case) for case in IMPOSSIBLE), *ON_OTHER_RANKS]


@pytest.mark.parametrize(("ranks", "values", "message"), ALL, ids=[f"{r} {v}" for r, v, _ in ALL])
def test_values_that_are_impossible_here(ranks: int, values: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError if "not divisible" in message else ConfigError, match=message):
        check_config(load_config(None, values), ranks)


def test_sections_and_figures_of_what_a_run_has_not() -> None:
    with pytest.raises(ConfigError, match=r"\[encoder\] is given, and no row of the data has images"):
        refuse_encoder_without_images(load_config(None, {"encoder.tp": 2}), 0)
    refuse_encoder_without_images(RunConfig(), 0)
    with pytest.raises(ConfigError, match=r"held out \(evaluation.documents\), which the run has not"):
        BestFigure.from_text("eval_loss").check_sets([])
    assert BestFigure.from_text("code/eval_rewards/margins:higher") == BestFigure("code", "eval_rewards/margins", True)


def test_what_a_run_computes_in() -> None:
    kinds = [ModelConfig(dtype=dtype) for dtype in ("float32", "bfloat16", "float64")]
    assert [compute_dtype(kind, "cuda") for kind in kinds] == [torch.bfloat16, torch.bfloat16, torch.float64]
    assert [compute_dtype(kind, "cpu") for kind in kinds] == [torch.float32, torch.bfloat16, torch.float64]
    assert compute_dtype(ModelConfig(compute_dtype="float32"), "cuda") == torch.float32
    adapter = {"model.dtype": "bfloat16", "lora.rank": 8, "lora.target_modules": ["q_proj"]}
    encoder = {"model.compute_dtype": "float32", "encoder.trainable": "projector", "encoder.max_tokens": 64}
    of_keys = [{}, adapter, {"model.dtype": "float64", "optimizer.class": "sgd"}, encoder]
    for keys, (gpu, device) in product(
        of_keys, ((True, "cuda"), (False, "cpu"))
    ):  # and memory is planned without torch
        config = load_config(None, keys)
        assert memory_settings_of_run(config, gpu=gpu).compute_bytes == compute_dtype(config.model, device).itemsize


def test_the_longest_document_is_named_where_nothing_was_cut() -> None:
    config = load_config(None, {"data.max_document_tokens": 0})
    home = check_config(config, 4)
    check_longest_training_document(config, home, 2048, "a.txt")
    too_long = r"\(2049 tokens, of a.txt\) on 4 ranks: .*2048.* It needs 513 rows of each of all 4 slots \(context.cont"
    with pytest.raises(ConfigError, match=too_long + r"ext_parallel_size = 4 or context.planner = "):
        check_longest_training_document(config, home, 2049, "a.txt")


def test_plans_keep_to_the_nodes_of_the_keys() -> None:
    keys = {"context.planner": "dynamic", "context.node_size": 2, "context.max_tokens_per_slot": 34}
    plan = PlannerConfig.training(load_config(None, keys | {"data.max_document_tokens": 64})).plan(
        (34, 60, 34), Layout(4)
    )
    groups = [group.slots for batch in plan.micro_batches for group in batch.groups]
    assert plan.node_size == 2 and {*groups} in ({(0,), (1,), (2, 3)}, {(2,), (3,), (0, 1)})


def test_the_types_of_a_plan_are_those_that_attention_has() -> None:
    assert set(COMM_TYPES) == {*PATTERNS, "auto"}


@pytest.mark.parametrize(("ranks", "degrees"), [(1, (1,)), (2, (1, 2)), (3, (1, 3)), (4, (1, 2, 4)), (6, (1, 2, 6))])
def test_degrees_that_are_compared(ranks: int, degrees: tuple[int, ...]) -> None:
    config = load_config(None, ONE)
    assert degrees_to_compare(check_config(config, ranks), PlannerConfig.training(config)) == degrees


def test_levels_follow_the_degree_that_is_compared() -> None:
    context = {"evaluation.cp_comm_type": "a2a+p2p", "context.cp_comm_type": "a2a+p2p", "context.planner": "dynamic"}
    config = load_config(None, context | {"context.hierarchical_context_parallel_sizes": 2})
    home, choice = check_config(config, 4), PlannerConfig.evaluation(config)
    plans = [choice.at_degree(degree, longest=40).plan((40, 9), home) for degree in (1, 2, 4)]
    plans.append(PlannerConfig.training(config).plan((4000, 9), home))
    found = [plan.micro_batches[0].groups[0].hierarchical_context_parallel_sizes for plan in plans]
    assert found == [(1, 1), (2, 1), (2, 2), (2, 2)]


@pytest.mark.parametrize("planner", ["fixed", "padded", "dynamic"])
def test_without_sizes_each_group_has_the_best_ones(planner: str) -> None:
    own = {"cp_comm_type": "a2a+p2p", "planner": planner, "max_tokens_per_slot": 1024}
    own |= {"context_parallel_size": 16}
    given = {f"{section}.{key}": value for key, value in own.items() for section in ("context", "evaluation")}
    given |= {"context.min_dynamic_context_parallel_size": 16, "model.path": "folder"}
    set_of_degree = {"name": "books", "path": "books", "context_parallel_size": 32}
    config, cost = load_config(None, given | {"evaluation.sets": [set_of_degree]}), Cost(across_bytes_per_second=1e9)
    choices = [PlannerConfig.evaluation(config, entry, cost=cost, heads=8) for entry in config.evaluations]
    for choice, cp in zip([PlannerConfig.training(config, cost=cost, heads=8), *choices], (16, 16, 32), strict=True):
        groups = choice.plan((16000, 15000), Layout(32)).micro_batches[0].groups
        assert {(g.degree, g.hierarchical_context_parallel_sizes) for g in groups} == {(cp, (8, cp // 8))}


A2A = {"context.cp_comm_type": "a2a", "context.planner": "dynamic"}
EVALUATED = {"evaluation.cp_comm_type": "a2a", "evaluation.context_parallel_size": 8}
HEADS = [  # on 16 ranks
    (
        {"context.cp_comm_type": "a2a", "context.context_parallel_size": 16},
        r"context.cp_comm_type 'a2a' deals 8 query heads to the 16 slots .*context_parallel_size 1, 2, 4, 8",
    ),
    (
        EVALUATED | {"parallel.tp": 2},
        r"evaluation.cp_comm_type 'a2a' .* 4 query heads \(of each rank, 8 / tp 2\) to the 8 slots",
    ),
    (A2A | {"context.max_tokens_per_slot": 128}, "which the heads limit to cp 8"),
]


@pytest.mark.parametrize(("keys", "message"), HEADS)
def test_degrees_that_the_query_heads_do_not_allow_are_refused_before_a_corpus_is_read(
    keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(load_config(None, keys), 16)
    config = load_config(None, EVALUATED | {"model.path": "folder", "optimizer.lr": 1e-5})
    with pytest.raises(ConfigError, match="deals 6 query heads to the 8 slots"):
        check_longest_training_document(config, check_config(config, 8), 100, "a.txt", 6)


def test_degrees_that_the_query_heads_do_not_allow_are_not_compared_nor_probed() -> None:
    config = load_config(None, A2A | {"evaluation.cp_comm_type": "a2a"})
    home, choice = Layout(8), PlannerConfig.evaluation(config, heads=6)
    assert degrees_to_compare(home, choice) == (1, 2) and degrees_to_compare(Layout(6), choice) == (1, 2, 6)
    model = QWEN3_8B | {"num_attention_heads": 6}
    facts = Facts(home=home, machine=Machine(), model=model, lengths_of_step=lambda step: [64], steps=1)
    full = Way(config, facts).plan_full_slots(64)
    assert {len(group.slots) for group in full.micro_batches[0].groups} == {2}


def test_dynamic_steps_have_degrees_that_the_query_heads_allow() -> None:
    config = load_config(None, A2A | {"context.max_tokens_per_slot": 300})
    order = StepOrder(np.full(40, 800), tokens_per_step=4000, seed=3, eval_documents=0)
    with plan_steps_ahead(PlannerConfig.training(config, cost=Cost(), heads=8), order, Layout(6), ahead=2) as plans:
        groups = [group for batch in plans.plan(0).micro_batches for group in batch.groups]
    assert {group.degree for group in groups} <= {1, 2, 4}


def test_the_page_is_made_from_the_sections() -> None:
    assert PAGE.read_text(encoding="utf-8") == REFERENCE_PAGE, "run: python docs/site/configuration.py"


def test_every_key_has_a_row_with_its_default_and_its_text() -> None:
    rows = [line for line in REFERENCE_PAGE.splitlines() if line.startswith("| `")]
    rest = [key.partition(".")[2] for key in config_keys() if key not in OFTEN]
    rest += [key.name for kind in (SourceConfig, EvalConfig) for key in section_keys(kind)]
    assert [row.split("`")[1] for row in rows] == [*OFTEN, *rest] and len(OFTEN) == 12
    (rate,) = (row for row in rows if "`min_lr_ratio`" in row)
    assert rate.split(" | ")[1:3] == ["a number, at least 0, at most 1", "`0.1`"]
