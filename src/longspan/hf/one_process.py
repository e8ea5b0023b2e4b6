"""To a Trainer all ranks are one process: what accelerate says while trainers of ours are open.

Samplers, orders, schedules and metrics of transformers and TRL are then their own code, with the batch of all ranks.
The last trainer puts accelerate's state back; a stock Trainer made meanwhile, which would sum nothing, is refused.
"""

import copy
import os
from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from transformers import Trainer, TrainingArguments

from longspan.comm import World
from longspan.errors import ConfigError
from longspan.layout import Layout

# A type checker would need the Trainer class that stands behind our parts in the order of bases.
StockTrainer: Any = object

# Arguments name the ranks whose rows one process reads.
RANKS_ATTRIBUTE = "_longspan_processes"


class OneProcess:
    """The world that open trainers share, and accelerate's state as it was before them."""

    # This is the process of the trainers that are open.
    now: "OneProcess | None" = None

    def __init__(self, home: Layout, world: World) -> None:
        """Note accelerate's state, which `_close` puts back; nothing is patched yet."""
        self.home: Layout = home
        self.world: World = world
        # This counts the trainers that are open.
        self.trainers: int = 0
        self._state = dict(PartialState._shared_state)
        self._patched: list[tuple[Any, str, Any]] = []  # class, name of an attribute, and its value before

    @classmethod
    def add_trainer(cls, make_home: Callable[[int], Layout]) -> "OneProcess":
        """Count one trainer more: open the world of this layout, or share the one that is open.

        Raises ConfigError for another layout, and for processes that accelerate does not know.
        """
        ranks = cls.now.ranks if cls.now else _count_ranks()
        home = make_home(ranks)
        if cls.now is None:
            device: Any = PartialState().device
            world = World(home, device="cpu" if device.type == "cpu" else None)  # None: this rank's GPU
            one_process = cls(home, world.open())
            try:
                one_process._patch_libraries()
            except BaseException:
                one_process._close()
                raise
            cls.now = one_process
        if cls.now.home != home:
            raise ConfigError(
                f"a longspan trainer is open under {cls.now.home}, and another asks for {home}; call end() of the "
                "first, or give both the same [parallel] keys"
            )
        cls.now.trainers += 1
        return cls.now

    @property
    def ranks(self) -> int:
        """The number of ranks that count as one process."""
        return len(self.home.ranks)

    def remove_trainer(self) -> None:
        """Count one trainer fewer; the last one puts accelerate's state back and closes the world."""
        self.trainers -= 1
        if self.trainers == 0:
            OneProcess.now = None
            self._close()

    def _close(self) -> None:
        for owner, name, value in reversed(self._patched):
            setattr(owner, name, value)
        PartialState._shared_state.clear()
        PartialState._shared_state.update(self._state)
        # AcceleratorState has a copy of this entry; it reads others from PartialState.
        if AcceleratorState._shared_state:
            AcceleratorState._shared_state["distributed_type"] = self._state["distributed_type"]
        self.world.close()

    def arguments_for_all_ranks(self, args: TrainingArguments) -> TrainingArguments:
        """Return a copy of arguments whose batches are those of all ranks."""
        copied = copy.copy(args)
        setattr(copied, RANKS_ATTRIBUTE, self.ranks)
        copied.per_device_train_batch_size *= self.ranks
        copied.per_device_eval_batch_size *= self.ranks
        return copied

    def _patch_libraries(self) -> None:
        """Until `_close`; a stock trainer that is made meanwhile raises ConfigError."""
        PartialState._shared_state.update({"num_processes": 1, "distributed_type": DistributedType.NO})
        make_stock, save_stock = Trainer.__init__, Trainer.save_model
        set_up = TrainingArguments.__dict__["_setup_devices"]

        @wraps(make_stock)  # constructors are asked for their signature
        def refuse_stock(trainer: Any, *args: Any, **keywords: Any) -> None:
            """Make a trainer. Raises ConfigError for a stock one, which would sum no gradients over the ranks."""
            if not hasattr(trainer, "longspan"):
                raise ConfigError(
                    f"{type(trainer).__name__} is made while a longspan trainer is open, and would train on "
                    f"{self.ranks} ranks without summing their gradients; call end() of the longspan trainer first, or "
                    "make this one by with_longspan, too"
                )
            make_stock(trainer, *args, **keywords)

        @wraps(save_stock)
        def save_on_all_ranks(trainer: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
            """Save by all ranks if the trainer is one of ours; otherwise as transformers does."""
            if hasattr(trainer, "longspan"):  # transformers 5.17 to 5.22 would have only the first rank save
                trainer._save(output_dir)
            else:
                save_stock(trainer, output_dir, _internal_call)

        def set_up_devices(args: TrainingArguments) -> torch.device:
            """Set up devices under the state that accelerate had before any trainer of ours, and put the present state
            back: transformers writes into it.
            """
            states = [(kind, dict(kind._shared_state)) for kind in (PartialState, AcceleratorState)]
            PartialState._shared_state.update(self._state)
            try:
                return set_up.func(args)
            finally:
                for kind, state in states:
                    kind._shared_state.clear()
                    kind._shared_state.update(state)

        devices = cached_property(set_up_devices)
        devices.__set_name__(TrainingArguments, "_setup_devices")
        # Arguments of ours have the batch of all ranks, so they count one process; other arguments count all ranks.
        patches: tuple[tuple[Any, str, Any], ...] = (
            (Trainer, "__init__", refuse_stock),
            (Trainer, "save_model", save_on_all_ranks),
            (TrainingArguments, "_setup_devices", devices),
            (
                TrainingArguments,
                "world_size",
                property(lambda args: 1 if hasattr(args, RANKS_ATTRIBUTE) else self.ranks),
            ),
            (PartialState, "wait_for_everyone", lambda _: self.world.control.barrier("accelerate")),
        )
        for owner, name, value in patches:
            self._patched.append((owner, name, owner.__dict__[name]))
            setattr(owner, name, value)


def _count_ranks() -> int:
    ranks = PartialState().num_processes
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != started:
        raise ConfigError(
            f"the launcher started {started} processes (WORLD_SIZE), and accelerate knows {ranks}, each of which would "
            "train by itself; without GPUs give use_cpu=True to the arguments, or set ACCELERATE_USE_CPU=true"
        )
    return ranks


class OneAccelerator(Accelerator):
    """An accelerator that takes the rows of all ranks: TRL slices them by `process_index`.

    The trainer checks a loss before its backward pass, and adds gradients after it: `training_step` may change them.
    """

    before_backward: Callable[[Any], None]
    after_backward: Callable[[], None]

    def backward(self, loss: Any, **keywords: Any) -> None:
        """Check the loss, run its backward pass, and add the step's gradients after the last batch's."""
        self.before_backward(loss)
        super().backward(loss, **keywords)
        self.after_backward()

    @property
    def process_index(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """0: this rank takes the rows of all."""
        return 0

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Leave a reference model where it is: longspan's `prepare` moves what a rank keeps."""
        if evaluation_mode:
            return model
        return super().prepare_model(model, device_placement, evaluation_mode)
