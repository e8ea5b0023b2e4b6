"""`longspan bench step` with rows of its peers: Hugging Face with FSDP2, over the same documents in the same run.

    python bench/training/step_peers.py --model.preset qwen3-8b --planners fixed --sequences 16384 --out peers.json

Flags are those of `longspan bench step`; `--planners none` times the peers alone. A single sequence runs under torch's
`context_parallel`; whole documents, as many as ranks or more, are packed under compiled layers and FlashAttention-4.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.begun import missing_row
from bench.training.hf_peer import PEER, open_peer_step
from bench.training.packed_peer import PACKED_PEER, open_packed_step

from longspan.bench.step.command import Cases, main, measure_steps, rows_note
from longspan.bench.step.settings import StepSettings
from longspan.comm import World


def peer_cases(settings: StepSettings, world: World) -> Cases:
    """The peers that suit each batch of documents."""
    for batch in settings.batches():
        note = rows_note(batch, settings)
        if len(batch.lengths) == 1:
            yield f"{PEER}{note}", partial(_measure_sequence, batch, world)
        if len(batch.lengths) >= settings.ranks:
            yield f"{PACKED_PEER}{note}", partial(_measure_packed, batch, world)


def _measure_sequence(settings: StepSettings, world: World) -> dict[str, Any]:
    try:
        with open_peer_step(settings, world) as (step, losses):
            return measure_steps(settings, step, world) | {"loss": losses[0]}
    except Exception as error:  # whatever it cannot do is recorded
        return missing_row(error)


def _measure_packed(settings: StepSettings, world: World) -> dict[str, Any]:
    try:
        with open_packed_step(settings, world) as (step, losses, facts):
            return measure_steps(settings, step, world) | {"loss": losses[0]} | facts
    except Exception as error:  # whatever it cannot do is recorded
        return missing_row(error)


if __name__ == "__main__":
    from bench.training import step_peers  # ranks import the function by this name

    sys.exit(main(sys.argv[1:], step_peers.peer_cases))
