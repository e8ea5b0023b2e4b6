"""`max_tokens_per_slot = "auto"`: how many rows of a micro-batch fit in a slot's memory, measured on the model itself.

Two probe micro-batches of different sizes, forward and backward (`row_probe.py`), give the bytes that do not depend on
rows and those of a row; the rows are what the budget then leaves room for, the least of all ranks. A third probe nearer
to these corrects them, as gradients may need more than the activations of few rows. After each probe the ranks tell
each other its bytes, and the next one is no larger than they allow. Weights and moments are accounted for beforehand:
probes change neither. A run keeps what it found in its folder and goes on with it.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank, run_on_first_rank
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError
from longspan.files import read_json, write_atomically
from longspan.model.multimodal.multimodal_model import MultimodalModel, find_language_model
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan.memory.step_peak import CONTEXT_BYTES
from longspan.train.memory.images_held import ImageBytes, measure_images
from longspan.train.memory.row_probe import measure_step_bytes, memory_keys, read_measurement, read_too_many_rows
from longspan.train.optim.offload_states import OffloadedStates
from longspan.train.optim.optimizer import OptimizerChoice
from longspan.train.plans import plan_row_multiple

CPU_BUDGET = 1 << 30  # bytes for gradients and activations on a CPU without train.memory_bytes


def activation_budget(config: RunConfig, model: nn.Module, optimizer: Optimizer, device: torch.device) -> float:
    """Return the bytes for gradients and activations: those that a run may fill, less weights, moments and GPU context.

    Moments that are not made yet are measured on a parameter of each shape; those on the host take nothing here.
    """
    train, on_host = config.train, isinstance(optimizer, OffloadedStates)
    states = 0 if optimizer.state or on_host else measure_state_bytes(OptimizerChoice.of(train), model)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the allocator keeps and does not use counts as free then
        taken_bytes = torch.cuda.memory_allocated(device) + CONTEXT_BYTES
        most_bytes = train.memory_fraction * (torch.cuda.mem_get_info(device)[0] + taken_bytes)
        return (train.memory_bytes or most_bytes) - taken_bytes - states
    if not train.memory_bytes:
        return float(CPU_BUDGET)
    moments = [] if on_host else tree_leaves(list(optimizer.state.values()))
    tensors = [local_tensor(x.detach()) for x in (*model.parameters(), *moments) if isinstance(x, Tensor)]
    return float(train.memory_bytes - states - sum(x.numel() * x.element_size() for x in tensors))


def measure_state_bytes(choice: OptimizerChoice, model: nn.Module) -> int:
    """Measure the bytes that the states of an optimizer will take, on one parameter of each shape."""
    local = [local_tensor(p.detach()) for p in model.parameters() if p.requires_grad]
    shapes = Counter((tuple(p.shape), p.dtype, p.device) for p in local)
    return sum(count * _measure_tensor_states(choice, *shape) for shape, count in shapes.items())


def _measure_tensor_states(
    choice: OptimizerChoice, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> int:
    """Measure the bytes of an optimizer's states for a parameter of this shape, by one step of that parameter."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = choice.build([parameter])
    optimizer.step()
    return sum(x.numel() * x.element_size() for x in tree_leaves(optimizer.state[parameter]) if isinstance(x, Tensor))


def count_states(choice: OptimizerChoice, dtype: torch.dtype) -> float:
    """Count the numbers of state that an optimizer keeps for each number of a matrix.

    >>> count_states(OptimizerChoice.of(TrainConfig()), torch.float32)
    2.0
    """
    size = _measure_tensor_states(choice, (_SIDE, _SIDE), dtype, torch.device("cpu"))
    return round(size / (_SIDE * _SIDE * dtype.itemsize), 3)  # rounded: the count of steps does not show


_SIDE = 128  # of the square matrix on which states are counted
FILE = "max_tokens_per_slot.json"  # in the run's folder: what was measured
PROBES = {"cuda": (1024, 4096)}  # rows of a slot in the first and second probe, by type of device
PROBES_ELSEWHERE = (64, 256)
FARTHEST = 8  # the third probe has at most so many times the rows of the larger one: farther no line is trusted


@dataclass(frozen=True)
class RowsThatFit:
    """The measured `rows` of a slot in a micro-batch, and the bytes behind them on the rank with the least room.

    `measured_for` are the keys of the configuration that it depends on.
    """

    rows: int
    bytes_per_row: float
    fixed_bytes: float
    budget_bytes: float
    ranks: int
    measured_for: dict[str, Any] = field(default_factory=dict[str, Any])


def fit_rows(probes: Sequence[tuple[int, int]], budget: float, ranks: int) -> RowsThatFit:
    """Return the rows that a budget holds, from two measurements (rows, most bytes). Raises ConfigError where none fit.

    >>> fit_rows([(100, 3000), (300, 7000)], 10_000, ranks=1).rows
    450
    """
    row_bytes, fixed = _fit_line(probes)
    rows = int((budget - fixed) // row_bytes)
    if rows < 1:
        raise ConfigError(
            f'context.max_tokens_per_slot is "{AUTO}": a row takes {row_bytes:,.0f} bytes beside {fixed:,.0f} for any '
            f"number of rows, and the budget is {budget:,.0f}; raise train.memory_fraction or train.memory_bytes, "
            "recompute activations (train.activation_checkpointing), or start more processes"
        )
    return RowsThatFit(rows, row_bytes, fixed, budget, ranks)


def use_measured_rows(config: RunConfig, world: World, log: LogLine) -> RunConfig:
    """Put the rows that an earlier start of the run measured, if any, in place of "auto"; entered by all ranks."""
    if config.context.max_tokens_per_slot != AUTO:
        return config
    file, ranks, keys = Path(config.run.dir) / FILE, len(world.home.ranks), memory_keys(config)
    fit: RowsThatFit | None = run_on_first_rank(
        world, lambda: read_measurement(RowsThatFit, file, ranks, keys, "it is measured again"), ConfigError
    )
    return config if fit is None else _use_rows(config, fit, log)


def measure_rows(
    config: RunConfig,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    log: LogLine,
    *,
    image_rows: float = 0.0,
    first_guess: int | None = None,
) -> RunConfig:
    """Measure how many rows of a slot fit, and put them in place of "auto"; entered by all ranks.

    `image_rows` are the rows of images in a step, on all slots together, of a model that has an encoder; `first_guess`
    is how many rows of a slot a plan of memory has room for.
    """
    if config.context.max_tokens_per_slot != AUTO:
        return config
    directory = Path(config.run.dir)
    ranks, keys = len(world.home.ranks), memory_keys(config)
    below = run_on_first_rank(world, lambda: read_too_many_rows(directory, ranks, keys), ConfigError)
    uses = 1 + config.mtp.depths
    images = measure_images(model, image_rows, world, uses=uses) if isinstance(model, MultimodalModel) else None
    fit = fit_by_probes(config, model, optimizer, world, below=below, images=images, first_guess=first_guess)
    fit = replace(fit, measured_for=keys)
    text = json.dumps(asdict(fit), indent=1)
    run_on_first_rank(world, lambda: write_atomically(directory / FILE, text), ConfigError)
    return _use_rows(config, fit, log)


def _use_rows(config: RunConfig, fit: RowsThatFit, log: LogLine) -> RunConfig:
    """Log the rows that fit, and put them in place of "auto", for training and for evaluation."""
    figures = f"{fit.rows:,} rows of {fit.bytes_per_row:,.0f} bytes each fit in {fit.budget_bytes:,.0f} bytes"
    log(f"max_tokens_per_slot: {figures}")
    return _set_eval_rows(replace(config, context=replace(config.context, max_tokens_per_slot=fit.rows)), fit.rows)


def use_training_rows(config: RunConfig) -> RunConfig:
    """Put the rows that the run measured for training in place of "auto"; for evaluation only.

    Evaluation keeps less than training, so these rows fit on any ranks. Raises ConfigError if none were measured.
    """
    if config.context.evaluation.max_tokens_per_slot != AUTO:
        return config
    file = Path(config.run.dir) / FILE
    try:
        rows = int(read_json(file)["rows"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f'context.eval_max_tokens_per_slot is "{AUTO}", the rows that training has measured, and {file} does not '
            f"say them ({error}); give a number of rows"
        ) from error
    return _set_eval_rows(config, rows)


def _set_eval_rows(config: RunConfig, rows: int) -> RunConfig:
    """Set `rows` in place of "auto" in evaluations, of the held-out documents and of each set."""
    if config.context.evaluation.max_tokens_per_slot == AUTO:
        config = replace(config, context=config.context.set_evaluation(max_tokens_per_slot=rows))
    sets = (replace(s, max_tokens_per_slot=rows) if s.max_tokens_per_slot == AUTO else s for s in config.eval)
    return replace(config, eval=tuple(sets))


def fit_by_probes(
    config: RunConfig,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    below: int | None = None,
    images: ImageBytes | None = None,
    first_guess: int | None = None,
) -> RowsThatFit:
    """Run two or three probes, and agree on the rows that fit on every rank.

    Two small probes give a line of bytes by rows. If half of the rows that fit by this line are more than either probe
    had, a third probe has that half and corrects the line. A probe of the `first_guess` of a plan of memory takes the
    place of the second and third, unless it has no more rows than the first: a line takes two sizes. The first probe
    runs twice (`warm`), as a first step also makes buffers that stay. `below` is a number of rows that did not fit
    before (None: none is known); probes and result have fewer. What `images` hold is taken off the budget. Raises
    ConfigError where fewer rows than two probes need are left, or images do not fit, and on a rank that runs out of
    memory in a probe.
    """
    budget = activation_budget(config, model, optimizer, world.device)
    if images is not None:
        run_on_every_rank(world, partial(images.check_budget, budget), ConfigError)
        budget -= images.held_bytes
    probes = _Probes(config, find_language_model(model), world, budget, below)
    probes.run_probe(probes.first, warm=True)
    if first_guess is not None and (rows := probes.limit_guess(first_guess)) > probes.first:
        probes.run_probe(rows)
        return probes.fit_largest_probes()
    probes.run_probe(probes.choose_second_rows())
    third_rows = probes.choose_third_rows()
    if third_rows > probes.largest_rows:
        probes.run_probe(third_rows)
    return probes.fit_largest_probes()


class _Probes:
    """The probes run so far, from which the next one follows; the same on every rank."""

    def __init__(self, config: RunConfig, model: nn.Module, world: World, budget: float, below: int | None) -> None:
        """Choose the rows of the first probe: those for this device, a quarter of what did not fit before at most.

        The second may then have twice as many. `budget` are the bytes of this rank; `below` is the number of rows that
        did not fit in an earlier start, if any. Raises ConfigError if that leaves too few rows for two probes.
        """
        self._config, self._model, self._world, self._below = config, model, world, below
        self._multiple = plan_row_multiple(config.parallel)
        self._sizes = PROBES.get(world.device.type, PROBES_ELSEWHERE)
        self._budgets: list[float] = world.control.gather_objects(budget)
        self._probed: list[tuple[int, list[int]]] = []  # rows, the most bytes of every rank
        self.first = self._round_rows(min(self._sizes[0], (below or math.inf) / 4))
        if self.first < 2 * self._multiple:
            raise ConfigError(
                f'context.max_tokens_per_slot is "{AUTO}": {below} rows of a slot did not fit when this run was '
                "started before, which leaves too few for probes; recompute activations "
                "(train.activation_checkpointing), start more processes, or give a number"
            )

    @property
    def largest_rows(self) -> int:
        """The rows of the largest probe."""
        return max(rows for rows, _ in self._probed)

    def run_probe(self, rows: int, *, warm: bool = False) -> None:
        """Run one probe, and share its bytes with the other ranks; with `warm` the same step runs before, uncounted."""
        if warm:  # a process's first step also makes buffers that stay
            self._measure_on_ranks(rows)
        self._probed.append((rows, self._measure_on_ranks(rows)))

    def _measure_on_ranks(self, rows: int) -> list[int]:
        """Run a step of so many rows, and return its bytes on every rank, 1 at least, for they are divided by."""
        bytes_here = measure_step_bytes(self._config, self._model, self._world, rows)
        return self._world.control.gather_objects(max(bytes_here, 1), f"the bytes of a probe of {rows} rows")

    def limit_guess(self, guess: int) -> int:
        """Return the rows of a probe of a guess: at most half of what did not fit before, and rounded down."""
        return self._round_rows(min(guess, self._row_limit / 2))

    def choose_second_rows(self) -> int:
        """Choose the rows of the second probe: more than the first if these surely fit, else half of the first.

        More means a quarter more at least, as closer probes make no good line; and at most half of the rows that are
        known not to fit, as a probe must not run out of memory.
        """
        rows, bytes_of_ranks = self._probed[0]
        # Of the rows that surely fit: as if all bytes grew with the rows, while a part of them does not.
        growth = min(budget / measured for budget, measured in zip(self._budgets, bytes_of_ranks, strict=True))
        larger = self._round_rows(min(self._sizes[1], rows * growth, self._row_limit / 2))
        return larger if larger >= rows + rows // 4 else self._round_rows(rows / 2)

    def choose_third_rows(self) -> int:
        """Choose the rows of the third probe: half of those that fit, at most FARTHEST times those of probes before."""
        return self._round_rows(
            min(self.fit_largest_probes().rows / 2, FARTHEST * self.largest_rows, self._row_limit / 2)
        )

    def fit_largest_probes(self) -> RowsThatFit:
        """Return the fit of the two largest probes, on the rank where the fewest rows fit.

        A fit that is not below the rows that did not fit before becomes half of them.
        """
        smaller, larger = sorted(self._probed)[-2:]
        by_rank = [
            ([(smaller[0], fewer_bytes), (larger[0], more_bytes)], budget)
            for fewer_bytes, more_bytes, budget in zip(smaller[1], larger[1], self._budgets, strict=True)
        ]
        fit = fit_rows(*min(by_rank, key=lambda measured: _largest_rows(*measured)), ranks=len(self._budgets))
        return fit if fit.rows < self._row_limit else replace(fit, rows=int(self._row_limit // 2))

    @property
    def _row_limit(self) -> float:
        """The rows that did not fit in an earlier start; infinity if there are none."""
        return self._below or math.inf

    def _round_rows(self, rows: float) -> int:
        """Round rows down to what a plan's slots hold, a multiple of tp under sequence parallelism."""
        return int(rows // self._multiple) * self._multiple


def _largest_rows(probes: Sequence[tuple[int, int]], budget: float) -> float:
    """Return how many rows a budget holds by two measurements; a fraction, and negative if none fit."""
    row_bytes, fixed = _fit_line(probes)
    return (budget - fixed) / row_bytes


def _fit_line(probes: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the bytes of a row, 1 at least, and those for any number of rows, from two measurements (rows, bytes)."""
    (fewer_rows, fewer_bytes), (more_rows, more_bytes) = probes
    row_bytes = max((more_bytes - fewer_bytes) / (more_rows - fewer_rows), 1.0)  # a budget is divided by it
    return row_bytes, max(fewer_bytes - row_bytes * fewer_rows, 0.0)
