"""The page of a run: one file that needs nothing else, whatever the run left behind."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from longspan.errors import ConfigError
from longspan.plan import Plan
from longspan.report import RunFolder, plan_page, write_report
from longspan.report.markup import tag, text
from tests.report.runs import FACTS, VOCABULARY, evaluation_row, mixed_plan, train_row, write_run

VOID = {"meta"}


class Page(HTMLParser):
    """Checks that elements nest, and keeps what the tests ask for."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.charts: list[dict] = []
        self.plans = 0
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        assert not {"src", "href", "srcset", "action", "xlink:href"} & given.keys(), given
        if "data-chart" in given:
            self.charts.append(json.loads(given["data-chart"] or ""))
        self.plans += "data-plan" in given
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def content(self) -> str:
        return " ".join(self.words)


def page_of(path: Path) -> Page:
    return Page(write_report(path).read_text(encoding="utf-8"))


def test_one_file_with_everything(tmp_path: Path) -> None:
    path = write_run(tmp_path / "first")
    html = write_report(path).read_text(encoding="utf-8")
    page = Page(html)
    assert not re.search(
        r"https?:|//[a-z]|@import|url\((?!#)|fetch\(|XMLHttpRequest", html.replace('"http://www.w3.org/2000/svg"', "")
    )
    assert "default-src 'none'" in html and "prefers-color-scheme: dark" in html and "@media print" in html
    assert page.plans == 2 * 2 * 3  # in time and in rows, for wide and for narrow pages
    names = [series["name"] for chart in page.charts for series in chart["series"]]
    assert {"training", "evaluation, cp 4", "each step"} <= set(names) and len(page.charts) == 8
    for words in ("Evaluation at each degree", "✓ equal", "+3.0e-08", "-2.0e-07", "step 60", "evaluation-cp4"):
        assert words in page.content, words
    assert "qwen3-tiny on a<b>&c · fixed plans, cp 2 · evaluated at cp 4 · steps 1 to 60" in page.content
    assert f"of ln V = {math.log(VOCABULARY):.3f}" in page.content


@pytest.mark.parametrize("title", ["Speed", "Time of a step", "Learning rate", "Peak memory"])
def test_charts_of_amounts_begin_at_zero(title: str, tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path / "run")).read_text(encoding="utf-8")
    figure = html[html.index(f"<b>{title}</b>") :]
    assert re.search(r">0( B)?</text>", figure[: figure.index("</figure>")])


def test_degrees_groups_and_losses_of_routers_are_shown(tmp_path: Path) -> None:
    rows = [train_row(step, router_balance_loss=1.0 + 1 / step, router_z_loss=2.0) for step in range(1, 9)]
    run = write_run(tmp_path / "run", rows=rows)
    with (run / "config.toml").open("a") as file:
        file.write('mode = "free"\n[parallel]\ntp = 2\npp = 1\nep = 4\nsequence_parallel = true\n')
    made = [{"kind": "tp", "ranks": [0, 1]}, {"kind": "parent", "ranks": [0, 2]}, {"kind": "parent", "ranks": [0, 1]}]
    (run / "groups.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made) + "torn")
    page = page_of(run)
    assert "tp 2 x ep 4, sequence-parallel · fixed plans, free, cp 2" in page.content
    assert "Router balance loss" in page.content and "Router z-loss" in page.content and len(page.charts) == 10


def test_versions_are_a_line_of_the_header_and_communicators_no_key_figure(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "groups.jsonl").write_text(json.dumps({"kind": "tp", "ranks": [0, 1]}) + "\n")
    html = write_report(run).read_text()
    head, cards = html.split("<header>")[1].split("</header>")[0], html.split('class="cards"')[1].split("</dl>")[0]
    assert "torch 2.13.0" in head and "torch" not in cards and "communicators" not in html
    narrow, wide = (html.index(f'class="chart {name}"') for name in ("narrow", "wide"))
    assert wide < narrow and ".chart.wide { display: none; }" in html


def test_what_is_running_and_how_near_it_comes_to_the_devices_and_the_bound(tmp_path: Path) -> None:
    shares = {"tflops": 420.0, "mfu": 0.4247, "bound_share": 0.88, "predicted_seconds": 0.27}
    run = write_run(tmp_path / "run", rows=[train_row(step, **shares) for step in range(1, 61)])
    (run / "run.json").write_text(json.dumps(FACTS))
    page = page_of(run)
    for words in (
        "30.5 B parameters, 3.82 B on a rank, 8 of 128 experts a token",
        "16 x NVIDIA H200, 2 hosts, nccl; MFU is of 989 TFLOP/s each",
        "42.5%",
        "median; 420 TFLOP/s a device",
        "the plan's lower bound, priced for the model on H200s, over the time",
    ):
        assert words in page.content, words
    assert len(page.charts) == 10 and "processes" not in page.content
    titles = [words for words in page.words if words in ("Model FLOPs utilisation", "Share of the plan's bound")]
    assert len(titles) == 2


def test_measured_over_predicted_seconds_are_one_number(tmp_path: Path) -> None:
    rows = [train_row(step, seconds=0.3, predicted_seconds=0.3 if step % 3 else 0.1) for step in range(1, 61)]
    page = page_of(write_run(tmp_path / "run", rows=[*rows, train_row(61, seconds=0.3)]))
    assert "measured / predicted" in page.content and "seconds, median of all steps" in page.content
    assert "1.00" in page.words
    assert "measured / predicted" not in page_of(write_run(tmp_path / "off")).content


def test_without_a_known_peak_the_flops_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=[train_row(step, tflops=0.0161) for step in range(1, 61)])
    (run / "run.json").write_text(json.dumps({"model": "of another release"}))
    page = page_of(run)
    assert "16.1 GFLOP/s" in page.content and len(page.charts) == 9
    assert "of another release" not in page.content and "utilisation" not in page.content


def test_text_is_escaped(tmp_path: Path) -> None:
    path = write_run(tmp_path / "<script>alert(1)</script>&")
    html = write_report(path).read_text(encoding="utf-8")
    assert "<script>alert" not in html and "a<b>" not in html
    assert "a<b>&c" in Page(html).content
    title = 'x"><script>alert(2)</script>'
    assert "<script>alert" not in plan_page(mixed_plan(2), title=title)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (tag("a", text("<&>")), "<a>&lt;&amp;&gt;</a>"),
        (tag("a", class_="x", data_d=3, hidden=True, none=None), '<a class="x" data-d="3" hidden></a>'),
        (tag("svg", viewBox="0 0 1 1", x=1.26, quote='"'), '<svg viewBox="0 0 1 1" x="1.3" quote="&quot;"></svg>'),
    ],
)
def test_markup(given: str, wanted: str) -> None:
    assert given == wanted


def test_long_runs_stay_small(tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=20_000)
    assert write_report(path).stat().st_size < 1_500_000


def test_a_spike_survives_thinning(tmp_path: Path) -> None:
    rows = [train_row(step, loss=99.0 if step == 7_777 else 4.0) for step in range(1, 10_001)]
    page = page_of(write_run(tmp_path, steps=10_000, rows=rows))
    raw = next(s for chart in page.charts for s in chart["series"] if s["name"] == "training")
    assert dict(zip(raw["x"], raw["y"], strict=True))[7_777] == 99.0 and len(raw["x"]) < 1000


def test_an_interrupted_run(tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=1, finished=False, plans=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 4.')
    (path / "plans").mkdir()
    (path / "plans" / "step-000001.json").write_text("{")
    page = page_of(path)
    for words in (
        "has not finished",
        "1 line of metrics.jsonl could not be read",
        "plans/step-000001.json is left out",
    ):
        assert words in page.content, words


def test_a_run_that_was_stopped_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (path / "summary.json").write_text(json.dumps({"stopped": "SIGTERM", "step": 60, "steps": 300}))
    assert "stopped by SIGTERM after step 60 of 300" in page_of(path).content


CHART_OF_METRIC = {
    "loss": "Training and evaluation",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Speed",
    "efficiency": "Rows used",
    "memory_bytes": "Peak memory",
    "lr": "Learning rate",
    "seconds": "Time of a step",
}


def titles_of_charts(run: Path) -> dict[str, int]:
    """The charts of a run's page by title, with the number of curves that have a point."""
    counts = dict[str, int]()
    for figure in write_report(run).read_text().split("<figure")[1:]:
        html = f"<figure{figure.split('</figure>')[0]}</figure>"
        charts = Page(html).charts
        counts[html.split("<figcaption><b>")[1].split("</b>")[0]] = sum(len(chart["series"]) for chart in charts)
    return counts


@pytest.mark.parametrize("name", CHART_OF_METRIC)
def test_a_metric_may_be_missing_or_not_finite(name: str, tmp_path: Path) -> None:
    """Its chart has no curve and its key figure is gone; what else was measured is shown as ever."""
    title = CHART_OF_METRIC[name]
    every = titles_of_charts(write_run(tmp_path / "all", steps=8))
    rows = [train_row(step, **{name: math.nan if step % 2 else None}) for step in range(1, 9)]
    empty = titles_of_charts(write_run(tmp_path / "a", steps=8, rows=rows))
    assert every[title] > 0 and empty == every | {title: int(name == "loss")}  # the evaluation is left
    assert np.isnan(RunFolder.read(tmp_path / "a").train[name]).all()
    rows = [{k: v for k, v in train_row(step).items() if k != name or name == "loss"} for step in range(1, 9)]
    lacking = titles_of_charts(write_run(tmp_path / "b", steps=8, rows=rows, finished=False, plans=False))
    assert lacking == (every if name == "loss" else empty)


def test_evaluation_alone(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, rows=[], finished=False, plans=False))
    assert "no training step" in page.content and "4.6000" in page.content


def test_a_resumed_run_counts_the_last_row_of_a_step(tmp_path: Path) -> None:
    rows = [train_row(1, loss=5.0), train_row(2, loss=6.0), train_row(2, loss=4.0), train_row(3, loss=3.0)]
    run = RunFolder.read(write_run(tmp_path, rows=rows))
    assert run.step.tolist() == [1, 2, 3] and run.train["loss"].tolist() == [5.0, 4.0, 3.0]


def test_a_usual_step_shows_first(tmp_path: Path) -> None:
    """Not the first one, which may be half empty: the step whose ratio to its bound is the median."""
    unmeasured = [train_row(step, seconds=None) for step in range(1, 61)]
    run = write_run(tmp_path, rows=unmeasured)
    saved = Plan.from_json((run / "plans" / "step-000001.json").read_bytes())
    for step, ratio in ((1, 1.9), (30, 1.2), (60, 1.1)):
        bound = saved.predicted_seconds / ratio
        (run / "plans" / f"step-{step:06d}.json").write_text(replace(saved, lower_bound_seconds=bound).to_json())
    html = write_report(run).read_text()
    assert re.findall(r'<option value="\d" selected>([^<]*)', html) == ["step 30"]
    shown = [hidden == "" for hidden in re.findall(r'data-plan-index="\d"( hidden)?', html)]
    assert shown == [False, True, False, False]
    assert [card.count('picture"><svg') for card in html.split('class="plan"')[1:]] == [0, 1, 0, 0]


def test_the_page_begins_with_what_came_of_the_run(tmp_path: Path) -> None:
    content = page_of(write_run(tmp_path / "run")).content
    assert (
        "Loss 7.44 → 5.49 in 18 s of steps; 4.6 on documents that it never saw, the same at degrees 1, 2, 4" in content
    )
    assert "60 steps, 240K tokens, 239K targets" in content and "packing efficiency" not in content.lower()
    differing = [evaluation_row(60, 1, 4.0), evaluation_row(60, 2, 4.1)]
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"eval_at_degrees": differing}))
    assert (
        "4 on documents that it never saw, different at degrees 1, 2 to 2.5e-02." in page_of(tmp_path / "run").content
    )


def test_equal_evaluations_of_a_step_are_one_mark(tmp_path: Path) -> None:
    rows = [evaluation_row(60, cp, 4.6 * (1 + d)) for cp, d in ((1, 1e-9), (2, 0.01))]
    run = write_run(tmp_path, rows=[*map(train_row, range(1, 61)), evaluation_row(30, 4, 5.0), *rows])
    chart = page_of(run).charts[0]
    names = [series["name"] for series in chart["series"] if series["name"].startswith("evaluation")]
    assert names == ["evaluation, cp 4; equal at 1 after step 60", "evaluation, cp 2"]


def test_evaluations_by_dynamic_plans_are_called_so_everywhere(tmp_path: Path) -> None:
    """Their largest degree is no degree of the evaluation, and may be another one each time."""
    run = write_run(tmp_path, rows=[train_row(step) for step in range(1, 61)])
    (run / "config.toml").write_text(
        '[context]\nplanner = "dynamic"\neval_planner = "dynamic"\neval_context_parallel_size = 1\n'
    )
    rows = [evaluation_row(step, cp, 4.5) | {"planner": "dynamic"} for step, cp in ((30, 4), (60, 2))]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*map(train_row, range(1, 61)), *rows])
    )
    (run / "summary.json").write_text("{}")
    page = page_of(run)
    names = [series["name"] for series in page.charts[0]["series"] if series["name"].startswith("evaluation")]
    assert names == ["evaluation, dynamic plans"]
    assert "evaluated by dynamic plans" in page.content and "evaluated at cp" not in page.content
    assert "after step 60; degree dynamic" in page.content and "2, dynamic" not in page.content


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_no_chart_and_no_figure_stands_alone_in_a_row(extra: int, tmp_path: Path) -> None:
    columns = dict(list({"router_balance_loss": 1.0, "router_z_loss": 2.0}.items())[:extra])
    html = write_report(write_run(tmp_path, rows=[train_row(step, **columns) for step in range(1, 9)])).read_text()
    grid = html.split('class="grid-3"')[1].split("</section>")[0]
    halves, charts = grid.count('class="chart half"'), grid.count('class="chart')
    assert (charts - halves) % 3 == 0 and halves % 2 == 0 and charts == 6 + extra


def test_degrees_that_differ_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    table = [evaluation_row(60, 1, 4.0), evaluation_row(60, 2, 4.0001)]
    table += [evaluation_row(60, 4, 4.0) | {"eval_tokens": 8}, {"cp": 8}, "x"]
    (path / "summary.json").write_text(json.dumps({"eval_at_degrees": table}))
    page = page_of(path)
    assert page.content.count("✗ differs") == 2 and "✓ equal" not in page.content


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is not the folder of a run: no such folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"there is no metrics\.jsonl in it; give the folder that"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('nothing\n[1]\n{"step": true}\n{"loss": 3}\n')
    with pytest.raises(ConfigError, match=r"holds no step \(4 unreadable lines\)"):
        write_report(tmp_path)


def test_many_plans_are_sampled(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    plan = (path / "plans" / "step-000001.json").read_text()
    for step in range(2, 40):
        (path / "plans" / f"step-{step:06d}.json").write_text(plan)
    names = [name for name, _ in RunFolder.read(path).plans]
    assert len(names) == 8 and names[0] == "step 1" and names[-1] == "evaluation-cp4"


@pytest.mark.parametrize("slots", [4, 1024])
def test_the_page_of_a_plan(slots: int) -> None:
    html = plan_page(mixed_plan(slots))
    page = Page(html)
    assert page.plans == 4 and html.count('class="gantt narrow"') == 2 and len(html) < 900_000
    assert "× 1.111" in page.content


def of_no_machine(run: Path) -> None:
    """As a run on CPUs leaves its plans."""
    for file in (run / "plans").iterdir():
        plan = Plan.from_json(file.read_bytes())
        file.write_text(replace(plan, cost=replace(plan.cost, source="")).to_json())


def test_plans_of_no_machine_show_no_seconds_but_measured_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    of_no_machine(run)
    html = write_report(run).read_text()
    assert "no machine: times only compare" in html and "share of the step, as predicted" in html
    assert "<dt>measured</dt>" in html and "Qwen3-8B" not in html and "scaled" not in page_of(run).content
    assert "predicted seconds" not in html and "<dt>predicted</dt>" not in html


def test_plans_of_a_machine_keep_their_times_and_name_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    priced = dict(RunFolder.read(run).plans)
    assert priced["evaluation-cp4"].predicted_seconds < priced["step 60"].predicted_seconds / 2
    assert "Qwen3-8B on GPUs of 400 TFLOP/s; forward passes alone" in page_of(run).content
