"""Metrics of a user's own, as configurations of tests name them."""

import os
import signal

import torch
from torch import Tensor

from longspan.train import TargetRows

TOP = 5
MADE = 2  # rows, on which a metric is tried


def top_five(rows: TargetRows) -> tuple[Tensor, int]:
    return (rows.logits.topk(TOP).indices == rows.targets[:, None]).any(-1).sum(), len(rows.targets)


def mean_of_losses(rows: TargetRows) -> Tensor:
    """No metric: a mean has no count."""
    return rows.losses.mean()


def told_to_stop(rows: TargetRows) -> tuple[int, int]:
    if len(rows.targets) != MADE and torch.distributed.get_rank() == 1 and not _told:
        _told.append(len(rows.targets))
        os.kill(os.getpid(), signal.SIGTERM)
    return 0, 0


_told = list[int]()
