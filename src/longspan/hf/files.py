"""What a Trainer writes and reads: models that transformers and peft load, checkpoints that resume bit for bit."""

import os
from typing import Any

import torch

import longspan
from longspan.train import find_checkpoint, load_checkpoint, save_checkpoint


class FilesPart:
    """Saving and resuming of a Trainer over a prepared model."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = output_dir or self.args.output_dir
        self._prepare_once()
        longspan.save_model(self._facade.prepared, folder, self.world, self.processing_class)
        if self.args.should_save:
            torch.save(self.args, os.path.join(folder, "training_args.bin"))
        self.world.control.barrier("saved")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, entered by all ranks."""
        self._save(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        save_checkpoint(output_dir, self._facade.prepared, optimizer, self.world, step=self.state.global_step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        found = find_checkpoint(checkpoint, self.world)
        load_checkpoint(found, self._facade.prepared, optimizer, self.world)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True))
        for group, rate in zip(optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._prepared_model is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        found = find_checkpoint(self.state.best_model_checkpoint, self.world)
        load_checkpoint(found, self._facade.prepared, None, self.world)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.world.control.barrier("checkpoint")
