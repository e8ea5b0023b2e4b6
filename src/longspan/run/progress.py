"""The progress of a running run, on its first rank: lines for some steps, for evaluations, and for what takes long."""

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from longspan.errors import plural
from longspan.plain_text import bytes_text, escape_controls, seconds_text

LINE_SECONDS = 30.0  # no longer without a line


class ProgressDisplay:
    """Shows steps and evaluations of a run; silent if `stream` is None."""

    def __init__(self, steps: int, stream: TextIO | None, *, log_every: int = 10) -> None:
        self._steps = steps
        self._stream = stream
        self._log_every = log_every
        self._writing = threading.Lock()
        self._ended = threading.Event()
        # This names what takes time now.
        self._work = "setting up"
        self._begun = time.monotonic()
        self._written = self._begun  # when the last line was
        self._thread = threading.Thread(target=self._log_while_quiet, name="longspan progress", daemon=True)
        # The end of this session's first step: the clock less the seconds of evaluations so far, and the step's number.
        self._timed_since: tuple[float, int] | None = None
        # The tokens are those of all documents of the steps after that one.
        self._step_tokens = 0
        self._eval_seconds = self._eval_tokens = 0.0
        # The three numbers are those of `set_schedule`.
        self._evaluations: tuple[tuple[int, int, int], ...] = ()

    def __enter__(self) -> "ProgressDisplay":
        if self._stream is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._stream is not None:
            self._thread.join()

    def set_schedule(self, steps: int, evaluations: Iterable[tuple[int, int, int]]) -> None:
        """Set the steps of the run, and of each evaluation set the tokens, the steps between its evaluations (0: there
        is none before the end), and how many come at the end.
        """
        self._steps = steps
        self._evaluations = tuple(evaluations)  # a generator would keep a failed run, and its groups, alive

    def log(self, text: str) -> None:
        """Write a line at once, from any thread."""
        if self._stream is not None:
            with self._writing:
                print(escape_controls(text), file=self._stream, flush=True)
                self._written = time.monotonic()

    def show_step(self, row: Mapping[str, Any]) -> None:
        """Write the line of a step from its row of metrics: for the first, the last, every `log_every`th, and where by
        the end of another step as long LINE_SECONDS would pass without a line. Each step counts for the time that is
        left.
        """
        step = row["step"]
        text = self._step_text(row)
        # The model may be saved or evaluated next.
        self.begin_work(f"after {text}")
        if self._timed_since is None:  # the first step compiles, and only starts the clock
            self._timed_since = time.monotonic() - self._eval_seconds, step
        else:
            self._step_tokens += row.get("tokens", 0) + row.get("spared_tokens", 0)
        is_late = time.monotonic() - self._written + row.get("seconds", 0.0) > LINE_SECONDS
        if self._stream is not None and (is_late or step % self._log_every == 0 or step in (1, self._steps)):
            self.log("  ".join(filter(None, (text, *_step_figures(row), self._remaining_time(step)))))

    def show_evaluation(self, row: Mapping[str, Any]) -> None:
        """Write the line of an evaluation, from its row of metrics; its time does not count as that of steps."""
        self.begin_work("after an evaluation")
        name = row.get("eval_name")
        tokens = row["eval_tokens"]
        seconds = row["seconds"]
        self._eval_tokens += tokens
        self._eval_seconds += seconds
        subject = f"evaluation of {name}: loss" if name else "evaluation loss"
        self.log(
            f"{self._step_text(row)}  {subject} {row['eval_loss']:.6f} at cp {row['cp']} "
            f"({', '.join([plural(tokens, 'token'), *_evaluation_texts(row)])}, in {seconds:.1f} s)"
        )

    def show_eval_progress(self, subject: str, done: int, count: int) -> None:
        """Note how many micro-batches of an evaluation, such as "of books at cp 2", are done, and how many it has."""
        self.begin_work(f"evaluation {subject}, {done:,} of {plural(count, 'micro-batch', 'es')}", again=done > 0)

    def begin_work(self, work: str, *, again: bool = False) -> None:
        """Note what takes time from now on, or (`again`) goes on."""
        self._work = work
        self._begun = self._begun if again else time.monotonic()

    def _log_while_quiet(self) -> None:
        """Runs in a thread, until the display is left."""
        while not self._ended.wait(min(1.0, LINE_SECONDS / 4)):
            now = time.monotonic()
            if now - self._written >= LINE_SECONDS:
                self.log(f"{self._work}: {now - self._begun:.0f} s so far")

    def _step_text(self, row: Mapping[str, Any]) -> str:
        return f"step {row['step']:>{len(str(self._steps))}}/{self._steps}"

    def _remaining_time(self, step: int) -> str:
        """No text until a second step is timed, and after the last. Until an evaluation is timed, one of its tokens
        is taken to need a third of the time of a token of training, as it has no backward pass."""
        assert self._timed_since is not None
        began, first_step = self._timed_since
        if not first_step < step < self._steps:
            return ""
        seconds = time.monotonic() - self._eval_seconds - began
        seconds_left = seconds / (step - first_step) * (self._steps - step)
        eval_token_seconds = seconds / max(self._step_tokens, 1) / 3
        if self._eval_tokens:
            eval_token_seconds = self._eval_seconds / self._eval_tokens
        for tokens, every, at_end in self._evaluations:
            # one that is due after `step` itself is still to come; that after the last step is one of `at_end`
            before_end = (self._steps - 1) // every - (step - 1) // every if every else 0
            seconds_left += (before_end + at_end) * tokens * eval_token_seconds
        return f"{seconds_text(seconds_left)} left"


def _step_figures(row: Mapping[str, Any]) -> list[str]:
    figures = [f"loss {row['loss']:.4f}", f"lr {row['lr']:.3g}", f"norm {row['grad_norm']:.3g}"]
    if "rewards/margins" in row:
        figures.append(f"margin {row['rewards/margins']:.3g}")
    if "teacher_mass" in row and row["kl"] != row["loss"]:
        figures.append(f"kl {row['kl']:.4g}")
    figures.append(f"{row['tokens_per_second']:.0f} tok/s")
    shares = {"mfu": "MFU", "bound_share": "bound", "encoder_share": "encoder"}
    figures += [f"{name} {100 * row[key]:.0f}%" for key, name in shares.items() if key in row]
    if depth_losses := [f"{loss:.4f}" for name, loss in row.items() if name.startswith("mtp_loss_")]:
        figures.append(f"mtp {'/'.join(depth_losses)}")
    return [*figures, bytes_text(row["memory_bytes"])]


def _evaluation_texts(row: Mapping[str, Any]) -> list[str]:
    """Metrics of the user's own have their names; other names with a "/" are left out."""
    texts = {
        "perplexity": "perplexity {:.4g}",
        "token_accuracy": "accuracy {:.1%}",
        "accuracy": "accuracy {:.1%}",
        "bits_per_byte": "{:.3f} bits/byte",
        "agreement": "agreement {:.1%}",
        "rewards/margins": "margin {:.4g}",
        "rewards/accuracies": "rewards/accuracies {:.1%}",
    }
    values = {
        key.removeprefix("eval_"): value
        for key, value in row.items()
        if key.startswith("eval_") and isinstance(value, float)
    }
    shown = {name: value for name, value in values.items() if name != "loss" and ("/" not in name or name in texts)}
    return [texts.get(name, f"{name} {{:.4g}}").format(value) for name, value in shown.items()]
