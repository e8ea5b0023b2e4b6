"""Loggers of a run, longspan's own (TensorBoard, Weights & Biases) and yours, which get the rows of metrics.jsonl.

A logger of your own is any class with `log(row, step)` and `close()` whose constructor takes a RunStart; `run.loggers`
names it with its module. Needs no torch: names are checked before any process starts.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from longspan.errors import ConfigError, RunFolderError, import_object
from longspan.files import read_json, write_atomically
from longspan.plain_text import nearest_hint

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True)
class RunStart:
    """The argument of a logger's constructor: the run's folder, its configuration by section, and the facts of
    run.json.

    `done` steps were done before this session. `rows` are the rows of metrics.jsonl from earlier sessions; steps after
    `done` are repeated, although loggers have already received their rows.
    """

    dir: Path
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    done: int
    rows: Sequence[Mapping[str, Any]]


class Logger(Protocol):
    """Receives the rows of a run, on its first rank only. An exception ends the logger, not the run."""

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """A row of metrics.jsonl: of a training step (`loss` and others), or of an evaluation (`eval_loss`, `cp`)."""
        ...

    def close(self) -> None:
        """Called at the end of the session, however it ends."""
        ...

    # If a logger has log_completions(rows, step), it gets the rows of completions.jsonl of a step there.


LoggerClass = Callable[[RunStart], Logger]
# longspan's own loggers: their classes by the name of the package and extra that they need.
BUILT_IN = {"tensorboard": "longspan.run.loggers.TensorBoardLogger", "wandb": "longspan.run.loggers.WandbLogger"}


def check_logger(name: str) -> None:
    """Raise ConfigError for a logger that is not known, or whose package is not installed."""
    if name in BUILT_IN and find_spec(name) is None:
        raise ConfigError(
            f"run.loggers has {name!r}, and {name} is not installed; pip install 'longspan[{name}]', or leave it out"
        )
    if name not in BUILT_IN and "." not in name:
        raise ConfigError(
            f"run.loggers has {name!r}; {nearest_hint(name, BUILT_IN)}, or a class of your own with its module, as in "
            "'my_package.my_module.MyLogger'"
        )


_WANDB_VARIABLES = {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"}
# lines of wandb's settings with which it needs no login: it is offline, or has a key
_NO_LOGIN = re.compile(r"^(mode *= *(offline|disabled|dryrun)|api_key *=)", re.MULTILINE)


def check_wandb_login(environment: Mapping[str, str]) -> None:
    """Raise ConfigError where variables and files show neither a login to wandb nor that it is offline. Without this
    check wandb itself would raise on the first rank, once the model is made.
    """
    if any(map(environment.get, _WANDB_VARIABLES)):
        return
    home = Path(environment.get("HOME", "~"))
    folders = (
        environment.get("WANDB_CONFIG_DIR", home / ".config/wandb"),
        environment.get("WANDB_DIR", ".") + "/wandb",
    )
    files = [folder / "settings" for folder in map(Path, folders)]
    texts = [f"mode = {environment.get('WANDB_MODE', '')}"]
    texts += [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    if any(map(_NO_LOGIN.search, texts)):
        return
    netrc = [Path(environment.get("NETRC", home / ".netrc")), home / "_netrc"]
    if not any(file.is_file() and file.stat().st_size for file in netrc):
        raise ConfigError(
            "run.loggers has 'wandb', and there is no login to it: wandb login, or set WANDB_API_KEY, or "
            "WANDB_MODE=offline, or leave it out"
        )


def logger_classes(names: Sequence[str]) -> dict[str, LoggerClass]:
    """Import the classes of loggers; returns them by name. Raises ConfigError for one that cannot be imported, or that
    lacks `log` or `close`.
    """
    classes = dict[str, LoggerClass]()
    for name in names:
        module, _, attribute = BUILT_IN.get(name, name).rpartition(".")
        kind = import_object(BUILT_IN.get(name, name), f"run.loggers has {name!r}")
        if not all(callable(getattr(kind, method, None)) for method in ("log", "close")):
            lack = "has no such class" if kind is None else f"has {attribute} without log(row, step) and close()"
            raise ConfigError(f"run.loggers has {name!r}, and {module} {lack}; see longspan.run.loggers.Logger")
        classes[name] = kind
    return classes


def scalars_by_display_name(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by display name; an evaluation's names contain its set and its degree.

    >>> scalars_by_display_name({"step": 2, "loss": 3.5, "lr": 0.1})
    {'train/loss': 3.5, 'train/lr': 0.1}
    >>> scalars_by_display_name({"step": 2, "eval_name": "books", "eval_loss": 3.5, "cp": 4})
    {'eval/books/loss_cp4': 3.5}
    """
    numbers = {
        key: value
        for key, value in row.items()
        if key not in ("step", "cp") and isinstance(value, int | float) and not isinstance(value, bool)
    }
    if "eval_loss" not in row:
        return {f"train/{key}": value for key, value in numbers.items()}
    chart = f"eval/{row['eval_name']}" if "eval_name" in row else "eval"
    return {f"{chart}/{key.removeprefix('eval_')}_cp{row['cp']}": value for key, value in numbers.items()}


class RunLoggers:
    """Hands rows to loggers; after its first exception, which is logged, a logger receives nothing more."""

    def __init__(
        self, classes: Mapping[str, LoggerClass], start: RunStart, log_line: Callable[[str], None]
    ) -> None:
        """Create the loggers in order. Raises ConfigError if one cannot start; loggers before it are closed."""
        self._loggers = dict[str, Logger]()
        self._log_line = log_line
        for name, make in classes.items():
            try:
                self._loggers[name] = make(start)
            except Exception as error:
                self.close()
                reason = f"{type(error).__name__}: {error}".rstrip(".")
                raise ConfigError(
                    f"the logger {name} of run.loggers cannot start: {reason}; or leave it out"
                ) from error

    def __enter__(self) -> "RunLoggers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, row: Mapping[str, Any]) -> None:
        """Hand a row of metrics.jsonl to all loggers."""
        self._call("log", row, row["step"])

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Hand the rows of completions.jsonl of a step to the loggers that take them."""
        self._call("log_completions", rows, step)

    def _call(self, method: str, value: Any, step: int) -> None:
        """A logger that raises is dropped, which is logged."""
        for name, logger in list(self._loggers.items()):
            try:
                if (call := getattr(logger, method, None)) is not None:
                    call(value, step)
            except Exception as error:
                del self._loggers[name]
                self._log_line(
                    f"the logger {name} failed at step {step} and gets no further row (metrics.jsonl has all): "
                    f"{type(error).__name__}: {error}"
                )

    def close(self) -> None:
        """Close all loggers, the newest first; what one of them raises is only logged."""
        while self._loggers:
            name, logger = self._loggers.popitem()
            try:
                logger.close()
            except Exception as error:
                self._log_line(f"the logger {name} could not be closed: {type(error).__name__}: {error}")


PROJECT = "longspan"  # where WANDB_PROJECT names no other
FILE = "wandb.json"


class WandbLogger:
    """A run of wandb, named after the run's folder, whose wandb.json has its id; its files are in `wandb/` there.

    wandb's own step is that of the run: it drops rows of steps that a resumed run repeats, and adds evaluations to the
    row of their step.
    """

    def __init__(self, start: RunStart) -> None:
        path = start.dir / FILE
        run_id = _read_wandb_id(path) if start.done and path.is_file() else None
        import wandb

        self._run = wandb.init(
            project=wandb.setup().settings.project or PROJECT,
            name=start.dir.resolve().name,
            id=run_id,
            resume="allow" if run_id else None,
            dir=str(start.dir),
            config={**start.config, "facts": dict(start.facts)},
            settings=wandb.Settings(console="off", silent=True),
        )
        write_atomically(path, json.dumps({"id": self._run.id}))

    def log(self, row: Mapping[str, Any], step: int) -> None:
        self._run.log(scalars_by_display_name(row), step=step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        import wandb

        columns: Any = ["step", "prompt", "completion"]
        data: Any = [[step, row["prompt"], row["completion"]] for row in rows]
        self._run.log({"completions": wandb.Table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()


def _read_wandb_id(file: Path) -> str:
    try:
        run_id = read_json(file)["id"]
        if not isinstance(run_id, str) or not run_id:
            raise ValueError("id is no text")
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{file} is damaged ({type(error).__name__}: {error}); put it back, or remove it, and wandb begins another "
            "run"
        ) from error
    return run_id


FOLDER = "tensorboard"


class TensorBoardLogger:
    """Writes event files into `tensorboard/` of the run's folder, flushed row by row."""

    def __init__(self, start: RunStart) -> None:
        self._start = start
        self._writer: SummaryWriter | None = None  # a session without a row leaves no file

    def log(self, row: Mapping[str, Any], step: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            start = self._start
            self._writer = SummaryWriter(str(start.dir / FOLDER), purge_step=start.done + 1)
            facts = "\n".join(f"| {name} | {value} |" for name, value in start.facts.items())
            self._writer.add_text("run", f"| fact | value |\n|---|---|\n{facts}", start.done)
        for tag, value in scalars_by_display_name(row).items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
