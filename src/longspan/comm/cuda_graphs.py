"""Calls that a GPU repeats: their kernels and exchanges are recorded as a CUDA graph, and replayed by one launch.

The host may take longer to launch a call than its device to compute it: attention of a short micro-batch is launched
layer after layer, the same on other tensors.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from longspan.comm.watch import Watch

Run = Callable[..., list[Any]]
MOST_RECORDINGS = 4  # the last ones: a micro-batch replays forward in one go, and backward in one go


class Replay:
    """A call of tensors to results, the same launches each time: run at first, recorded the second time, then replayed.

    Tensors have the shapes of the first call each time. Before a replay they are copied to where the recording reads,
    and after it results are copied from where the recording writes; a result that is an input, or no tensor, is not.
    The exchanges of a replay meet those of members that run or record the call. `label` names a replay in failure
    reports.
    """

    def __init__(self, watch: Watch, label: str) -> None:
        self._watch = watch
        self._label = label
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs = list[Tensor]()
        self._written = list[Tensor]()  # the tensors among `_results` that the recording writes
        self._results = list[Any]()

    def __call__(self, run: Run, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the results of `run(*tensors)`; `run` is called at the first call, recorded (and replayed) at the
        second, and only replayed from the third on.
        """
        self._calls += 1
        if self._calls == 1:
            return run(*tensors)
        if self._graph is None:
            self._inputs = [torch.empty_like(x) for x in tensors]
            self._graph, self._results = record_graph(lambda: run(*self._inputs))
            self._written = [
                x for x in self._results if isinstance(x, Tensor) and id(x) not in map(id, self._inputs)
            ]
            _recorded.append(self)
            forget_replays(MOST_RECORDINGS)
        with self._watch.enter_operation(self._label, self._watch.ranks) as operation:
            torch._foreach_copy_(self._inputs, list(tensors))
            self._graph.replay()
            self._watch.watch_stream(operation)
        copies = [torch.empty_like(x) for x in self._written]
        torch._foreach_copy_(copies, self._written)
        # The key is the id of a tensor of the recording; the caller's input, or the copy of a result, stands for it.
        returned = dict(zip(map(id, [*self._inputs, *self._written]), [*tensors, *copies], strict=True))
        return [returned.get(id(x), x) for x in self._results]

    def forget(self) -> None:
        """Give up the recording: the next call runs, the one after it is recorded anew."""
        self._calls = 0
        self._graph = None
        self._inputs = []
        self._written = []
        self._results = []


_recorded = deque[Replay]()


def forget_replays(count: int = 0) -> None:
    """Give up all recordings but the last `count`, the oldest first; a call that lost its recording runs once more,
    and is then recorded anew.

    All are given up before groups are destroyed, as NCCL waits for graphs of theirs.
    """
    while len(_recorded) > count:
        _recorded.popleft().forget()


def record_graph(run: Callable[[], list[Any]]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """Record a call on the current device; return its graph, and its results, whose tensors every replay writes anew.

    Recordings that are made under one current stream share memory, as their replays follow each other in that stream.
    """
    stream, pool, _ = _recorder(torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)
    return _record_on_stream(run, stream, pool)


def _record_on_stream(
    run: Callable[[], list[Any]], stream: torch.cuda.Stream, pool: Any
) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            results = run()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, results


@cache
def _recorder(device: int, current_stream: int) -> tuple[torch.cuda.Stream, Any, torch.cuda.CUDAGraph]:
    """The third value is a graph that is never replayed: the pool stays while any graph has memory of it."""
    stream = torch.cuda.Stream(device)
    pool = torch.cuda.graph_pool_handle()
    graph, _ = _record_on_stream(lambda: [torch.zeros(1, device=device)], stream, pool)
    return stream, pool, graph
