"""Attention finds the shard of the layer that is running: nested, after errors, in other threads, in recomputation."""

from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longspan.model.seams import attention_calls
from longspan.model.seams.attention_calls import run_within_layer, running_layer


class _Layer(nn.Module):
    def __init__(self, inner: nn.Module | None = None, fails: bool = False) -> None:
        super().__init__()
        self.inner, self.fails, self.found = inner, fails, list[Any]()
        self.register_forward_pre_hook(attention_calls._note_arguments, with_kwargs=True)
        self.register_forward_hook(attention_calls._forget_arguments, always_call=True)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        if self.inner is not None:
            x = self.inner(x, shard="inner")
        self.found.append((running_layer().shard, running_layer().attention_kernel))
        if self.fails:
            raise ValueError("a layer fails")
        return x.sin()


X = torch.ones(2, requires_grad=True)


def test_nested_layers_and_none_outside() -> None:
    inner = _Layer()
    outer = _Layer(inner)
    outer(X, shard="outer", attention_kernel="reference")
    assert inner.found == [("inner", None)] and outer.found == [("outer", "reference")]
    assert running_layer().shard is None and running_layer().attention_kernel is None


def test_nothing_is_left_after_an_error() -> None:
    with pytest.raises(ValueError, match="a layer fails"):
        _Layer(_Layer(fails=True))(X, shard="outer")
    assert running_layer().shard is None

    def refuse(*_: Any) -> None:
        raise ValueError("an earlier hook fails")

    outer = _Layer(_Layer())
    outer.inner.register_forward_pre_hook(refuse, prepend=True)  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(ValueError, match="an earlier hook fails"):
        outer(X, shard="outer")
    assert running_layer().shard is None


def test_recomputation_finds_its_own_shard_in_another_thread() -> None:
    layer = _Layer()
    outs = [checkpoint(run_within_layer(partial(layer.forward, shard=i)), X, use_reentrant=False) for i in range(2)]
    thread = Thread(target=lambda: [out.sum().backward() for out in outs])
    thread.start()
    thread.join()
    assert layer.found == [(i, None) for i in (0, 1, 0, 1)] and running_layer().shard is None
    assert run_within_layer(layer) is layer


def test_a_part_of_a_layer_is_recomputed_with_the_shard_around_it() -> None:
    class Whole(_Layer):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            assert self.inner is not None
            return checkpoint(run_within_layer(partial(self.inner.forward)), x, use_reentrant=False)

    part = _Layer()
    out = Whole(part)(X, shard="whole", attention_kernel="torch")
    out.sum().backward()
    assert part.found == [("whole", "torch")] * 2 and running_layer().shard is None
