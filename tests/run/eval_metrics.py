"""Metrics of a user's own, as configurations of tests name them."""

import os
import signal

import torch
from torch import Tensor

from longspan.train import TargetTokens

TOP = 5


def top_five(rows: TargetTokens) -> tuple[Tensor, int]:
    return (rows.logits.topk(TOP).indices == rows.targets[:, None]).any(-1).sum(), len(rows.targets)


def loss(rows: TargetTokens) -> tuple[Tensor, int]:
    """A metric of a name that every evaluation has."""
    return rows.losses.sum(), len(rows.targets)


def told_to_stop(rows: TargetTokens) -> tuple[int, int]:
    if torch.distributed.get_rank() == 1 and not _told:
        _told.append(len(rows.targets))
        os.kill(os.getpid(), signal.SIGTERM)
    return 0, 0


_told = list[int]()
