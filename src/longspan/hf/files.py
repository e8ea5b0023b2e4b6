"""What a Trainer writes and reads: models that transformers and peft load, checkpoints that resume bit for bit.

`checkpoint-8` has the model as `save_model` writes it, `optimizer/`, `rng/` by rank, `order.pt` (the place in the
epoch, and the states that drew its order), and transformers' own files. Until it is whole it stands in `unfinished/`.
"""

import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, Sampler
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint, rotate_checkpoints
from transformers.utils import logging

import longspan
from longspan.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from longspan.checkpoint.files import complete_checkpoints, read_state, state_value, sync_to_disk
from longspan.comm.all_ranks import is_first_rank, result_or_first_error, run_on_every_rank, run_on_first_rank
from longspan.errors import CheckpointError, ConfigError, ModelError
from longspan.hf.one_process import StockTrainer
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.model.adapters.adapter import find_adapter
from longspan.model.adapters.adapter_files import write_adapter
from longspan.model.saving.stock_folders import load_weights, stock_configuration, write_all_but_weights
from longspan.model.weights.configuration_values import changed_values, configuration_values, decides_numbers
from longspan.model.weights.hf_folder import read_configuration
from longspan.plain_text import items_text

GLOBAL_GENERATORS: tuple[Any, ...] = (
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
)


class EpochOrder(NamedTuple):
    """An epoch that runs: its loader, its number, the step at which it began, and the states with which it began."""

    loader: Any
    number: int
    first_step: int
    began: list[Any]


def read_order_states(loader: Any) -> list[Any]:
    """Return the states of all generators that decide the order of a loader's rows: global ones first, then its own."""
    states = [get() for get, _ in (*GLOBAL_GENERATORS, *_generator_accessors(loader))]
    return tree_map(lambda x: x.tolist() if isinstance(x, np.ndarray) else x, states)


def _generator_accessors(owner: Any) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """The order is that of attributes, so that states can be set in the order in which they were read."""
    for value in vars(owner).values():
        if isinstance(value, (torch.Generator, np.random.RandomState)):
            yield value.get_state, value.set_state
        elif isinstance(value, random.Random):
            yield value.getstate, value.setstate
        elif isinstance(value, np.random.Generator):
            bits: Any = value.bit_generator
            yield lambda bits=bits: bits.state, lambda state, bits=bits: setattr(bits, "state", state)
        elif isinstance(value, (DataLoader, Sampler, IterableDataset)):
            yield from _generator_accessors(value)


UNFINISHED = "unfinished"
OPTIMIZER = "optimizer"
SCHEDULER = "scheduler.pt"
RANDOM = "rng"
STATE = "trainer_state.json"
ORDER = "order.pt"
ARGUMENTS = "training_args.bin"
_log = logging.get_logger(__name__)


def load_without_code(file: Path) -> Any:
    """Return the tensors and plain values in a file of `torch.save`.

    >>> load_without_code(Path("checkpoint-8/scheduler.pt"))["last_epoch"]
    8

    Raises CheckpointError for a file that is damaged or holds anything else, which is not run.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged file raises anything
        raise CheckpointError(unreadable_data_text(file, error)) from error


class FilesPart(StockTrainer):
    """Saving and resuming of a Trainer over a prepared model."""

    _unfinished: str | None = None  # the folder in which a checkpoint is being written
    # This is what `order.pt` of a checkpoint has.
    _order: dict[str, Any] | None = None
    # This is the epoch that runs.
    _epoch: EpochOrder | None = None

    def _try_to_save_files(self) -> None:
        """Entered by all ranks. Where that fails, ModelError is raised on every rank, or a warning logged if nothing is
        to be saved."""

        def write() -> None:
            """Write configuration, tokenizer, arguments and state into a temporary folder; called on the first rank."""
            with tempfile.TemporaryDirectory(prefix=".", dir=self.args.output_dir) as name:
                model: Any = copy(unwrap_peft_model(self.model))
                folder = Path(name)
                if (adapter := find_adapter(model)) is not None:
                    write_adapter(folder, adapter, {}, self._model_tokenizer)
                else:
                    model.config = stock_configuration(model.config)
                    write_all_but_weights(model, folder, self._model_tokenizer)
                torch.save(self._stock_arguments, folder / ARGUMENTS)
                self.state.save_to_json(str(folder / STATE))

        def saving_error(error: Exception) -> ModelError:
            text = f"a save into {self.args.output_dir} would fail, tried before training: {type(error).__name__}"
            return ModelError(f"{text}: {error}")

        try:
            result_or_first_error(self.world, lambda: write() if is_first_rank(self.world) else None, saving_error)
        except ModelError as error:
            if self.args.save_strategy != SaveStrategy.NO:
                raise
            _log.warning(str(error))

    @property
    def _model_tokenizer(self) -> Any:
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Entered by all ranks."""
        folder = Path(output_dir or self.args.output_dir)
        self._prepare_once()
        longspan.save_model(self._facade.inner_model, folder, self.world, self._model_tokenizer)
        arguments = folder / ARGUMENTS
        # The arguments as they were given: `args` has the batch of all ranks.
        run_on_first_rank(self.world, lambda: torch.save(self._stock_arguments, arguments), CheckpointError)

    def _get_output_dir(self, trial: Any) -> str:
        return self._unfinished or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Entered by all ranks: the checkpoint is written into `unfinished/` and then gets its name."""
        root = Path(self._get_output_dir(trial))

        def make_empty_folder() -> None:
            shutil.rmtree(root / UNFINISHED, ignore_errors=True)
            (root / UNFINISHED).mkdir(parents=True)

        run_on_first_rank(self.world, make_empty_folder, CheckpointError)
        self._unfinished = str(root / UNFINISHED)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._unfinished = None
        # The Trainer looked for the folder of the best checkpoint in `unfinished/`; this step's folder comes next.
        best_step, step = self.state.best_global_step, self.state.global_step
        folder = root / f"checkpoint-{best_step}"
        if best_step and self.args.save_strategy != SaveStrategy.NO and (best_step == step or folder.exists()):
            self.state.best_model_checkpoint = str(folder)
        self.world.control.barrier("checkpoint")
        run_on_first_rank(self.world, lambda: self._publish_checkpoint(root), CheckpointError)

    def _publish_checkpoint(self, root: Path) -> None:
        """Entered by the first rank. Files are on disk before the checkpoint has its name, so that one of this name is
        whole after a crash."""
        unfinished = root / UNFINISHED
        folder = root / f"checkpoint-{self.state.global_step}"
        self.state.save_to_json(str(unfinished / folder.name / STATE))
        for path in (*(unfinished / folder.name).rglob("*"), unfinished / folder.name):
            sync_to_disk(path)
        if folder.exists():
            folder.rename(unfinished / "replaced")
        (unfinished / folder.name).rename(folder)
        sync_to_disk(root)
        shutil.rmtree(unfinished)
        best_checkpoint = self.state.best_model_checkpoint
        limit = self.args.save_total_limit
        rotate_checkpoints(str(root), save_total_limit=limit, best_model_checkpoint=best_checkpoint, use_mtime=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Entered by all ranks. With the groups go the rows of a step, in which data order is counted, and the seed of
        dropout's masks."""
        optimizer = self._torch_optimizer()
        root = Path(output_dir)
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        groups = tree_map(lambda value: value.item() if isinstance(value, Tensor) else value, groups)
        state = {"rows": self._rows_of_step(), "seed": self.world.seed, "groups": groups}
        step = self.state.global_step
        prepared = self._facade.inner_model
        save_checkpoint(root / OPTIMIZER, prepared, optimizer, self.world, step=step, state=state, weights=False)
        schedule = self.lr_scheduler.state_dict()
        run_on_first_rank(self.world, lambda: torch.save(schedule, root / SCHEDULER), CheckpointError)

    def _save_rng_state(self, output_dir: str) -> None:
        """Entered by all ranks."""
        super()._save_rng_state(str(Path(output_dir) / RANDOM / str(self.world.rank)))
        assert self._epoch is not None
        loader, number, first_step, began = self._epoch
        steps = self.state.global_step - first_step
        now = read_order_states(loader)
        order = {"epoch": number, "steps": steps, "began": began, "now": now}
        run_on_first_rank(self.world, lambda: torch.save(order, Path(output_dir) / ORDER), CheckpointError)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **keywords: Any) -> Any:
        """Train as the Trainer does; a checkpoint to resume from is one of a longspan trainer with as many rows a step.

        Raises ConfigError for another number of rows a step, CheckpointError for a folder that cannot be resumed from.
        """
        if resume_from_checkpoint is True:
            newest = run_on_first_rank(self.world, self._newest_checkpoint, CheckpointError)
            resume_from_checkpoint = newest or True  # where there is none, the Trainer says so
        return super().train(resume_from_checkpoint, *args, **keywords)

    def _newest_checkpoint(self) -> str | None:
        root = Path(self.args.output_dir)
        if (root / UNFINISHED).is_dir():
            _log.warning(f"{root / UNFINISHED} is left of a save that was interrupted; it is not resumed from")
        return get_last_checkpoint(str(root)) if root.is_dir() else None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """`_load_optimizer_and_scheduler` reads weights too, once the model is prepared."""
        checkpoint = Path(resume_from_checkpoint)
        run_on_first_rank(self.world, lambda: self._check_resumable(checkpoint), CheckpointError)
        if is_first_rank(self.world) and (line := other_configuration_line(checkpoint, self.model)):
            _log.warning(line)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Entered by all ranks."""
        if checkpoint is None:
            return
        prepared = self._facade.inner_model
        optimizer = self._torch_optimizer()
        root = Path(checkpoint)
        saved = find_checkpoint(root / OPTIMIZER, self.world, _log.warning)
        assert saved is not None, f"{checkpoint} was checked, and holds no checkpoint of an optimizer"
        load_weights(prepared, root, self.world)
        with _drop_empty_groups(optimizer):
            state = load_checkpoint(saved, prepared, optimizer, self.world, weights=False)
        schedule = run_on_every_rank(self.world, lambda: load_without_code(root / SCHEDULER), CheckpointError)
        self.lr_scheduler.load_state_dict(schedule)
        _restore_group_settings(root, optimizer, state_value(saved, state, "groups"))
        self.world.seed = state_value(saved, state, "seed")

    def _init_training_state(self, max_steps: int, steps_per_epoch: int, *args: Any) -> tuple[int, int]:
        """(epoch, batches of it that are done). If a resumed run's length is not known, the Trainer counts one epoch:
        then the saved place is returned, not the Trainer's."""
        place = super()._init_training_state(max_steps, steps_per_epoch, *args)
        *_, checkpoint, _ = args  # …, resume_from_checkpoint, trial
        self._order = None
        if checkpoint is not None and (path := Path(checkpoint) / ORDER).exists():
            self._order = order = run_on_every_rank(self.world, lambda: load_without_code(path), CheckpointError)
            if steps_per_epoch == max_steps > self.state.global_step and not self.args.ignore_data_skip:
                return order["epoch"], order["steps"] * self.args.gradient_accumulation_steps
        return place

    def _run_epoch(self, **keywords: Any) -> None:
        """The first epoch of a resumed run begins with saved states: those that drew its order if some of its batches
        are done, else those at the save."""
        loader = keywords["train_dataloader"]
        number = keywords["epoch"]
        first_step = self.state.global_step
        if self._order is not None:
            batches = keywords["steps_trained_in_current_epoch"]
            states = self._order["began" if batches else "now"]
            # States of generators that the loader lacks now are left out.
            for (_, set_state), state in zip(
                (*GLOBAL_GENERATORS, *_generator_accessors(loader)), states, strict=False
            ):
                set_state(state)
            first_step -= batches // self.args.gradient_accumulation_steps
            self._order = None
        self._epoch = EpochOrder(loader, number, first_step, read_order_states(loader))
        super()._run_epoch(**keywords)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """If another number of ranks saved states, all take the first rank's."""
        if checkpoint is None:
            return
        root = Path(checkpoint) / RANDOM
        ranks = len(self.world.home.ranks)
        is_same_number = len(list(root.iterdir())) == ranks
        folder = root / str(self.world.rank if is_same_number else self.world.home.ranks[0])
        run_on_every_rank(self.world, lambda: self._load_random_states(folder), CheckpointError)

    def _load_random_states(self, folder: Path) -> None:
        try:
            super()._load_rng_state(str(folder))
        except OSError:
            # An OSError is of the disk, and not of the file's content: `run_on_every_rank` reports it.
            raise
        except Exception as error:  # a damaged file, or one of something else, may raise anything
            raise CheckpointError(unreadable_data_text(folder, error)) from error

    def _load_best_model(self) -> None:
        """Entered by all ranks."""
        best_folder = Path(self.state.best_model_checkpoint)
        if not run_on_first_rank(self.world, best_folder.is_dir, CheckpointError):
            _log.warning(
                f"{best_folder}, the best checkpoint, is not there any more: the model stays that of the last step"
            )
            return
        _log.info(f"Loading best model from {best_folder} (score: {self.state.best_metric}).")
        load_weights(self._facade.inner_model, best_folder, self.world)

    def _torch_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _rows_of_step(self) -> int:
        return self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps

    def _check_resumable(self, checkpoint: Path) -> None:
        if not checkpoint.is_dir():
            raise CheckpointError(f"there is no checkpoint {checkpoint} to resume from")
        saved = complete_checkpoints(checkpoint / OPTIMIZER)
        if not saved or not all((checkpoint / name).exists() for name in (SCHEDULER, RANDOM, STATE)):
            reason = "it has no state of an optimizer, as save_only_model leaves it out, or it is not whole"
            if (checkpoint / "optimizer.pt").exists():
                reason = "it was saved by a Trainer without longspan, whose optimizer holds other tensors"
            raise CheckpointError(
                f"{checkpoint} cannot be resumed from by a longspan trainer: {reason}; begin anew from its weights: "
                f"AutoModelForCausalLM.from_pretrained({str(checkpoint)!r}), and train() without resume_from_checkpoint"
            )
        rows = self._rows_of_step()
        saved_rows = state_value(saved[0], read_state(saved[0]), "rows")
        if rows != saved_rows:
            size = self._stock_arguments.per_device_train_batch_size
            batches = self.args.gradient_accumulation_steps
            raise ConfigError(
                f"{checkpoint} was trained with {saved_rows} rows a step, and this run takes {rows} (per_device_train_"
                f"batch_size {size} × {len(self.world.home.ranks)} processes × gradient_accumulation_steps {batches}): "
                f"a longspan trainer resumes with as many rows a step; set these two to make {saved_rows}"
            )


def other_configuration_line(checkpoint: Path, model: Any) -> str:
    """Return a line that names the values of a model's configuration that decide numbers and were others when a
    checkpoint of a Trainer was saved; "" where there are none, and where its config.json cannot be read.
    """
    try:
        before = configuration_values(read_configuration(checkpoint))
        now = configuration_values(stock_configuration(model.config))
    except ModelError:  # an adapter's checkpoint has none, and transformers knows no class of the user's own
        return ""
    # The Trainer sets pad_token_id by the tokenizer.
    changes = {name: text for name, text in changed_values(before, now).items() if decides_numbers(name)}
    changes.pop("pad_token_id", None)
    if not changes:
        return ""
    return (
        f"{checkpoint} was saved by a model of another configuration, over which training goes on: "
        f"{items_text([*changes.values()])}"
    )


@contextmanager
def _drop_empty_groups(optimizer: Any) -> Iterator[None]:
    """torch (2.11 to 2.15) cannot load groups without parameters. Transformers makes one where no parameter, or every
    one, is without weight decay, as in an adapter."""
    empty = [(index, group) for index, group in enumerate(optimizer.param_groups) if not group["params"]]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    try:
        yield
    finally:
        for index, group in empty:
            optimizer.param_groups.insert(index, group)


def _restore_group_settings(checkpoint: Path, optimizer: Any, groups: list[dict[str, Any]]) -> None:
    groups_here = len(optimizer.param_groups)
    if len(groups) != groups_here:
        raise CheckpointError(
            f"{checkpoint} has {len(groups)} groups of parameters, and this optimizer {groups_here}; resume with the "
            "optimizer and the weight decay that it was saved with"
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples, such as betas


def unreadable_data_text(file: Path, error: Exception) -> str:
    """Say why a file of tensors and plain values is not read, and what to do; torch advises to run what is in it."""
    reason = f"holds something else than tensors and plain values, or is damaged ({type(error).__name__})"
    if match := re.search(r"GLOBAL (\S+)", " ".join(str(error).split())):
        reason = f"names {match[1]}, which is neither a tensor nor a plain value and may be code"
    return (
        f"{file} {reason}; nothing of it was run. Copy it again from where it was saved, or use another checkpoint"
    )
