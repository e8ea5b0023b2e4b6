"""The wheel in an empty environment: installed there with extras, its examples copied, and the tutorial's commands run:
train, eval, export, generate, an adapter, plan. `make wheel-demo`.

    python bench/source/wheel_demo.py WHEEL [FOLDER] [pip's words, such as torch==2.13.0+cpu]

FOLDER (default: a temporary one) gets the environment and the run. No file of the checkout is read: the programs run in
FOLDER, without PYTHONPATH.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

STEPS = 20
EXTRAS = "lora,data,tensorboard"
PLAN = (
    "plan --distribution lognorm --slots 32 --tokens 1048576 --seed 1 --machine h200 --cp-comm-type auto"  # laptop.md
)


def main(wheel: str, folder: str = "", *words: str) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        return demo(Path(wheel).resolve(), Path(folder or temporary).resolve(), words)


def demo(wheel: Path, folder: Path, words: tuple[str, ...]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*command: str) -> str:
        print("$", *command, flush=True)
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout

    venv.create(folder / "venv", with_pip=True)
    python, longspan = (str(folder / "venv" / "bin" / name) for name in ("python", "longspan"))
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[{EXTRAS}]", *words)
    print(run(longspan, "--version").strip())
    place = run(python, "-W", "error", "-c", "import longspan; print(longspan.__file__)").strip()
    if not Path(place).is_relative_to(folder):
        raise SystemExit(f"longspan comes from {place}, not from the environment in {folder}")
    run(longspan, "examples", "all", "examples", "--overwrite")
    demo_run = folder / "runs" / "demo"
    keys = [f"--train.steps={STEPS}", "--evaluation.every=0", f"--run.dir={demo_run}", "--checkpoint.resume=never"]
    keys += ["--run.loggers", "tensorboard"]
    print(run(longspan, "train", "examples/first.toml", "--world", "4", "--device", "cpu", *keys), end="")
    summary = json.loads((demo_run / "summary.json").read_text())
    report = (demo_run / "report.html").read_text()
    assert summary["steps"] == STEPS and "<style>" in report, "the run has no whole report"
    print(run(longspan, "eval", str(demo_run), "--device", "cpu", "--evaluation.context_parallel_size", "1"), end="")
    print(run(longspan, "export", str(demo_run), "exported", "--overwrite"), end="")
    print(run(longspan, "generate", "exported", "--prompt", "The first", "--max-new-tokens", "8", "--device", "cpu"))
    (folder / "texts.jsonl").write_text(20 * '{"prompt": "The first", "completion": " is the last."}\n')
    adapter = ["--model.path", "exported", "--data", "texts.jsonl", "--lora.rank", "4", "--train.epochs", "1"]
    keys = ["--world", "2", "--device", "cpu", "--run.dir", "runs/adapter", "--checkpoint.resume=never"]
    print(run(longspan, "train", *adapter, *keys), end="")
    print(run(longspan, *PLAN.split(), "--plot", "plan.html"), end="")
    print(f"the wheel {wheel.name} trains, evaluates, writes and plans in an environment of its own")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
