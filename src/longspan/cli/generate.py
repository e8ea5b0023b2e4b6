"""`longspan generate`: saved weights complete prompts, on any number of ranks."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from longspan.cli.eval import parse_eval, prepare_request
from longspan.cli.flags import Groups, Repeated, Word, check_flags_at_least, parse_flags
from longspan.cli.processes import Device, print_note, prints_results, run_on_ranks
from longspan.errors import ConfigError, DataError
from longspan.evaluation.fit_layout import fit_evaluation_plans
from longspan.evaluation.request import EvalRequest
from longspan.files import as_json
from longspan.launch.output import keep_prints_from_failing
from longspan.launch.stop_signals import block_signals
from longspan.resolve.planner_config import home_of
from longspan.run.progress import ProgressDisplay

if TYPE_CHECKING:
    from longspan.evaluation.completions import Completions


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # characters that would steer a terminal


@dataclass(frozen=True)
class GenerateFlags:
    """Complete prompts with the weights of a run, a checkpoint or a Hugging Face folder, by transformers' `generate`.

    What a tokenizer with a chat template gets is said by a user, and the answer is what is printed.

    longspan generate runs/first --prompt "def main"

    longspan generate Qwen3-0.6B --prompts prompts.jsonl --temperature 0.7
    """

    SHOWN: ClassVar[Groups] = {"flags": ("--prompt", "--prompts", "--max_new_tokens", "--temperature", "--json")}
    target: Annotated[
        str, Word("RUN|CHECKPOINT|HF_FOLDER", "a run, a checkpoint or a model's folder", "runs/first")
    ]
    """A run's folder (its newest good checkpoint, with evaluation.patience its best; an adapter with its base model),
    the folder of one checkpoint, or a Hugging Face folder."""
    prompt: Repeated = ()
    """A prompt; again for more."""
    prompts: str = ""
    """A file of prompts, as evaluation.prompts: a line each, or rows of .jsonl, .json or .csv with text, prompt or
    messages."""
    text: bool = False
    """Take each --prompt as plain text, also where the tokenizer has a chat template."""
    max_new_tokens: int = 256
    """Tokens of a completion, at most."""
    temperature: float = 0.0
    """0: the likeliest token follows (greedy); above, tokens are drawn."""
    seed: int = 0
    """Of tokens that are drawn."""
    tokenizer: str = ""
    """A folder with tokenizer.json; empty: that of the run, or of the model's folder."""
    dtype: Literal["", "float32", "float64", "bfloat16"] = ""
    """Parameters: float32, float64 or bfloat16. Default: as the run has them; of a folder: float32."""
    world: int = 0
    """Processes to start on this machine; 0: one for each GPU, without GPUs as many as the run had on CPUs, or those of
    torchrun."""
    device: Device = "auto"
    """auto: a GPU for each process where there are any; cpu: processes on CPUs; cuda: GPUs, or an error."""
    json: bool = False
    """Print the completions as one JSON list."""


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    flags = parse_flags(GenerateFlags, argv, "longspan generate")
    check_flags_at_least(flags, seed=0, max_new_tokens=1)
    if not flags.prompt and not flags.prompts:
        raise ConfigError('there is no prompt; give --prompt "…", or --prompts FILE')
    if not 0 <= flags.temperature < float("inf"):
        raise ConfigError(
            f"--temperature is {flags.temperature:g}; give 0 for the likeliest tokens, or a number above"
        )
    if flags.prompts and not Path(flags.prompts).is_file():
        raise DataError(f"--prompts: there is no file {flags.prompts}; give one with a prompt on each line")
    words = [flags.target, *(["--model.dtype", flags.dtype] if flags.dtype else [])]
    words += ["--tokenizer", flags.tokenizer] if flags.tokenizer else []
    processes, request = prepare_request(words, parse_eval(words), flags.world, flags.device)
    print_note(processes.note, sys.stderr)
    args = (request, flags, processes.ranks, processes.backend)
    completions: Completions = run_on_ranks(_generate_on_rank, args, processes.ranks)
    if prints_results():
        rows = [row._asdict() for row in completions.rows]
        text = "\n\n".join(f"> {row.prompt}\n{row.completion}" for row in completions.rows)
        if sys.stdout.isatty():
            text = _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)
        print(as_json(rows, indent=1) if flags.json else text)
        print(completions.cost, file=sys.stderr)
    return 0


def _generate_on_rank(
    rank: int, request: EvalRequest, flags: GenerateFlags, ranks: int, backend: str
) -> "Completions":
    """Every rank returns all completions. torch is imported here."""
    keep_prints_from_failing(None, ["stderr"])
    # Some imports catch every exception, and that of a signal with them.
    with block_signals():
        from longspan.comm import World
        from longspan.comm.all_ranks import run_on_every_rank
        from longspan.comm.received_signals import StopSignal
        from longspan.corpus.prompts import Prompt, encode_prompts, read_prompt_rows
        from longspan.corpus.rows.sample import Row
        from longspan.evaluation.completions import CompletionSettings, complete_prompts
        from longspan.evaluation.load_saved import find_checked_weights, load_saved_model
        from longspan.plan.shape.positions import position_limit

    (subject,) = request.subjects
    home = home_of(subject.config.parallel, ranks)
    config = fit_evaluation_plans(subject.config, home, None, 1, request.flag_keys)
    key = "text" if flags.text else "prompt"
    flag_rows = [Row(f"--prompt {i}", {key: text}) for i, text in enumerate(flags.prompt, 1)]
    with (
        World(home, backend=backend, timeout=config.run.timeout_seconds) as world,
        ProgressDisplay(0, sys.stderr if rank == 0 else None) as display,
        StopSignal() as stop,
    ):
        checked = find_checked_weights(subject, request.tokenizer, world, display.log)

        def read_prompts() -> list[Prompt]:
            file_rows = read_prompt_rows(Path(flags.prompts)) if flags.prompts else []
            limit = position_limit(checked.configuration)
            prompts = encode_prompts([*flag_rows, *file_rows], checked.tokenizer, limit)
            return [
                prompt._replace(temperature=flags.temperature) if prompt.temperature is None else prompt
                for prompt in prompts
            ]

        prompts = run_on_every_rank(world, read_prompts, DataError)
        model, _ = load_saved_model(checked, config, checked.configuration, world)
        display.begin_work("completions of prompts")
        settings = CompletionSettings(checked.tokenizer, subject.folder, flags.max_new_tokens, flags.seed)
        return complete_prompts(model, prompts, world, settings._replace(stopped=lambda: stop.received))
