"""Keys of version 0.3: their page, the files that `longspan upgrade` rewrites, and configurations of older runs."""

import runpy
import tomllib
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from longspan.cli.main import main
from longspan.cli.upgrade import NOT_CARRIED_OVER, upgrade_text
from longspan.config.file import config_keys, load_config
from longspan.config.renamed import ALL_IMAGES, GONE, RENAMED, REPLACING, VALUES, upgraded_tables
from longspan.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "upgrade.md"
OLD = """\
# a run of 0.3
[model]
preset = "qwen3-tiny"
rope_scaling = "yarn"  # long
rope_factor = 4.0

[data]
turns = "split"
eval_documents = 3
cache = "tokens"

[context]  # who shares documents
planner = "fixed"
eval_context_parallel_size = 4
eval_min_dynamic_context_parallel_size = 2
eval_max_tokens_per_slot = 64
eval_cp_comm_type = "p2p"

[train]
steps = 3
# the peak
lr = 1e-3  # and down
memory = "none"
float8 = "rows"
save_every = 2
# rounding
fused_norms = "off"
betas = [0.8, 0.9]  # slower
activation_checkpointing = "selective"  # not attention
offload_activations = true
schedule = "wsd"
decay_steps = 1
center_rewards_coefficient = 0.1

[encoder]
recompute = true

[[eval]]
name = "books"
planner = "dynamic"
path = "books"  # on disk
min_dynamic_context_parallel_size = 1
max_dynamic_context_parallel_size = 2
hierarchical_context_parallel_sizes = 0
max_tokens_per_slot = 96
cp_comm_type = "a2a"
metrics = ["mine.hits"]
"""
NEW = """\
# a run of 0.3
[model]
preset = "qwen3-tiny"
rope_scaling = "yarn:4"  # long

[data]
split_turns = true

[context]  # who shares documents
planner = "fixed"

[train]
steps = 3
plan_memory = false
float8 = "rowwise"
# rounding
activation_checkpointing = "selective+host"  # not attention
loss_arguments = ["center_rewards_coefficient=0.1"]
"""


def test_every_new_key_is_a_key_and_no_old_one_is() -> None:
    assert {*RENAMED.values(), *VALUES} - {*GONE} <= {*config_keys()} and {*REPLACING} <= {*config_keys()}
    assert not {*RENAMED, *GONE} & {*config_keys()}


def test_the_page_has_the_table() -> None:
    upgrade_table = runpy.run_path(str(PAGE.parent / "site/configuration.py"))["upgrade_table"]
    assert upgrade_table() in PAGE.read_text(encoding="utf-8")


def test_a_file_is_rewritten_with_its_comments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(OLD)
    assert main(["upgrade", str(file), "--dry-run"]) == 0
    text, told = capsys.readouterr()
    assert file.read_text() == OLD and text.startswith(NEW)
    assert main(["upgrade", str(file)]) == 0
    out = capsys.readouterr().out
    assert told == out, "what a dry run says of it, too"
    assert (
        "train.fused_norms is gone: nothing: norms are fused on GPUs; in Python prepare(fused_norms=); not carr" in out
    )
    lost = "context.eval_min_dynamic_context_parallel_size, data.cache, train.fused_norms"
    assert sorted(
        out.splitlines()[-1].partition("not carried over: ")[2].split(", see above")[0].split(", ")
    ) == sorted(lost.split(", "))
    assert "train.memory is train.plan_memory = false" in out and file.read_text() == text
    old_names = {new: old for old, new in RENAMED.items()}
    assert all(f"{old_names.get(key, key)} is gone: {advice}" in out for key, advice in GONE.items())
    assert "# the peak\nlr = 1e-3  # and down" in text and 'path = "books"  # on disk' in text
    assert tomllib.loads(text) == upgraded_tables(tomllib.loads(OLD))
    config = load_config(file)
    assert config.optimizer.arguments == ("betas=[0.8, 0.9]",) and config.optimizer.schedule == ("wsd", 1)
    assert config.encoder.max_tokens == ALL_IMAGES and config.model.rope == ("yarn", 4)
    evaluation = config.evaluation  # with what each of its sets needs
    assert (evaluation.max_tokens_per_slot, evaluation.cp_comm_type, evaluation.metrics) == (96, "auto", ("mine.hits",))
    assert (config.optimizer.lr, config.checkpoint.every, config.evaluation.sets[0].name) == (1e-3, 2, "books")
    assert main(["upgrade", str(file)]) == 0 and file.read_text() == text
    assert upgrade_text(text) == (text, [])


@settings(deadline=None)  # the first example imports what the others use
@given(
    st.sets(
        st.sampled_from(sorted(old for old, new in RENAMED.items() if old not in VALUES and new not in GONE)),
        min_size=1,
    ),
    st.booleans(),
)
def test_any_old_keys_are_rewritten_where_they_stand_or_move(keys: set[str], comments: bool) -> None:
    lines = list[str]()
    for section, names in groupby(sorted(keys), lambda key: key.partition(".")[0]):
        lines += [f"[{section}]", *(f"{name.partition('.')[2]} = 1{'  # why' * comments}" for name in names), ""]
    text, changes = upgrade_text("\n".join(lines))
    found = {f"{section}.{key}" for section, table in tomllib.loads(text).items() for key in table}
    assert found == {RENAMED[key] for key in keys} and len(changes) == len(keys)
    assert text.count("# why") == comments * len(keys)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("offload_activations = true", ""),
        ("offload_activations = false", ""),
        ('activation_checkpointing = "full"\noffload_activations = false', 'activation_checkpointing = "full"'),
        ("activation_checkpointing = true\noffload_activations = true", 'activation_checkpointing = "full+host"'),
        ("betas = [0.9, 0.95]", ""),
        ('optimizer_arguments = ["eps=1"]\nbetas = [0.9, 1e-3]', ["eps=1", "betas=[0.9, 0.001]"]),
    ],
)
def test_keys_that_are_gone(old: str, new: str | list[str]) -> None:
    text, changes = upgrade_text(f"[train]\n{old}\n")
    is_lost = old == "offload_activations = true"  # without recomputation, on whose host its activations would go
    assert [change for change in changes if NOT_CARRIED_OVER in change] == [
        'train.offload_activations is gone: train.activation_checkpointing = "full+host" or "selective+host"; '
        "not carried over: true"
    ] * is_lost
    assert any("; written: " in change for change in changes) is (
        "1e-3" in old or (old.startswith("activation") and "true" in old)
    )
    wanted = (
        {"optimizer": {"arguments": new}} if isinstance(new, list) else tomllib.loads(f"[train]\n{new}" * (new != ""))
    )
    assert tomllib.loads(text) == wanted and any("is gone: " in change for change in changes)


def test_a_factor_of_positions_is_written_as_in_the_checkpoints_of_its_run() -> None:
    """A file's 4 and the 4.0 that 0.3 saved of it are one value: a resumed run compares model.rope_scaling."""
    for factor, word in ((4, "yarn:4"), (4.0, "yarn:4"), (2.25, "yarn:2.25")):
        tables = {"model": {"rope_scaling": "yarn", "rope_factor": factor}}
        assert upgraded_tables(tables) == {"model": {"rope_scaling": word}}


@pytest.mark.parametrize("section", ["context", "evaluation"])
def test_rows_and_type_of_a_set_are_kept_where_training_or_evaluation_gives_others(section: str) -> None:
    plan = {"max_tokens_per_slot": 512, "cp_comm_type": "a2a"}
    sets = [{"name": "books", "max_tokens_per_slot": 4096, "cp_comm_type": "p2p"}]
    evaluation = upgraded_tables({section: plan, "eval": sets})["evaluation"]
    assert evaluation == {"sets": [{"name": "books"}], "max_tokens_per_slot": 4096, "cp_comm_type": "auto"}


def test_keys_of_sets_that_are_gone() -> None:
    text = '[[evaluation.sets]]\nname = "a"\nplanner = "fixed"  # why\n\n[[evaluation.sets]]\nname = "b"  # here\n'
    new, changes = upgrade_text(text)
    assert tomllib.loads(new) == {"evaluation": {"sets": [{"name": "a"}, {"name": "b"}]}} and "# here" in new
    assert changes == [f"eval.planner is gone: {GONE['eval.planner']}"] and upgrade_text(new) == (new, [])
    with pytest.raises(ConfigError, match=r"evaluation.sets.a.planner in .*: it is gone; write nothing, or context_p"):
        load_config(None, {"evaluation.sets": [{"name": "a", "path": "x", "planner": "fixed"}]})
    inline = '# why\neval = [{name = "a", path = "p", planner = "fixed"}, {name = "b"}]\n\n[run]\ndir = "x"\n'
    new, changes = upgrade_text(inline)
    assert tomllib.loads(new) == {
        "run": {"dir": "x"},
        "evaluation": {"sets": [{"name": "a", "path": "p"}, {"name": "b"}]},
    }
    assert "# why" in new and len(changes) == 2
    for broken in ("evaluation = 3\n", "[evaluation]\nsets = [1]\n"):
        assert upgrade_text(broken) == (broken, [])


def test_the_configuration_of_an_older_run_is_read_in_its_folder_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(OLD)
    with pytest.raises(ConfigError, match=r"train.lr in .*: it is optimizer.lr now \(longspan upgrade "):
        load_config(file)
    (tmp_path / "run.json").write_text("{}")
    config = load_config(file)
    assert config.optimizer.lr == 1e-3 and not config.train.plan_memory and config.evaluation.documents == 3


BOTH = "by its old and its new name"
LIST = "give a list, and then upgrade the file"
REFUSED = [
    ('train.lr = 1.0\ntrain.memory = "none"\n', "another form"),
    ("[train]\nlr = 1.0\n[optimizer]\nlr = 2.0\n", f"{BOTH}: train.lr and optimizer.lr; leave one out"),
    ('[train]\nmemory = "none"\nplan_memory = true\n', f"{BOTH}: train.memory and train.plan_memory; leave one out"),
    ('[[eval]]\nname = "a"\n[[evaluation.sets]]\nname = "b"\n', f"{BOTH}: eval and evaluation.sets; leave one out"),
    ("eval = 3\n", r"eval is 3; give tables, each below a line \[\[eval\]\]"),
    ("[eval]\nname = 'a'\n", r"eval is {'name': 'a'}; give tables, each below a line \[\[eval\]\]"),
    ("[train]\nbetas = 3\n", f"train.betas is 3; {LIST}"),
    ('[train]\nloss_arguments = "beta=1"\ncenter_rewards_coefficient = 1\n', f"loss_arguments is 'beta=1'; {LIST}"),
    ('[[eval]]\nname = "books"\nmetrics = 3\n', f"metrics is 3; {LIST}"),
    ('train = 3\n[data]\ncache = "x"\n', r"train is 3; give a table, with its keys below \[train\]"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_files_that_cannot_be_upgraded_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        upgrade_text(text)
    assert upgraded_tables({"train": 3, "data": {"cache": "x"}}) == {"train": 3}
