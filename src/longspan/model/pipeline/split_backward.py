"""A backward pass in two parts, as zero-bubble schedules want it: gradients of the inputs first, of the weights later.

The idea is that of Zero Bubble Pipeline Parallelism (Qi et al., arXiv:2401.10241) and of torch's
`pipelining._backward`: where the way from a weight to the outputs meets the way from an input, at a *joint* of the
graph, the first part keeps the gradient that passes, and the second goes on from there to the weight alone. torch's own
second part cannot start at an autograd.Function (2.11), takes every joint for one with a single output (2.11), and
counts a weight that is used twice doubly (2.11; pytorch issue 180952). This one is exact for all of them.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Passed = tuple[Tensor | None, ...]
Edge = tuple[GradientEdge, Tensor]


class _Joints:
    """Weights whose ways meet those of the inputs at the same joints, and what passes these: a gradient per output.

    `ends` are gradients of outputs that no input leads to: nothing passes them in the first part.
    """

    def __init__(self, nodes: Set[Node], ends: Sequence[Edge]) -> None:
        self.nodes, self.ends, self.weights = nodes, ends, list[nn.Parameter]()
        self.passed: dict[Node, Passed] = {}

    def keep(self, node: Node) -> Any:
        """Keep what passes a joint in the first part."""
        return node.register_prehook(lambda gradients: self.passed.__setitem__(node, tuple(gradients)))

    def hold(self, node: Node) -> Any:
        """Let nothing else pass a joint in the second part: its gradient holds what came through the others already."""
        return node.register_prehook(lambda _: self.passed[node])

    @property
    def edges(self) -> list[Edge]:
        """Where the second part starts."""
        passed = [(GradientEdge(node, i), g) for node, of in self.passed.items() for i, g in enumerate(of)]
        return [*self.ends, *((edge, g) for edge, g in passed if g is not None)]


class WeightsLater(NamedTuple):
    """What the gradients of weights start from; the outputs keep the graph alive."""

    outputs: list[Edge]
    joints: list[_Joints]


def backward_to_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None] | None,
    inputs: Sequence[Any],
    weights: Iterable[nn.Parameter],
) -> tuple[Passed, WeightsLater]:
    """The gradients of `inputs` (None where one has none), also added to their `.grad`; and what weights need later.

    `gradients` are those of the outputs, ones by default (a loss).
    """
    given = [torch.ones_like(x) for x in outputs] if gradients is None else gradients
    pairs = [(x, g) for x, g in zip(outputs, given, strict=True) if x.requires_grad and g is not None]
    wanted = [x for x in inputs if _differentiable(x)]
    later = _later([(get_gradient_edge(x), g) for x, g in pairs], wanted, weights)
    handles = [joints.keep(node) for joints in later.joints for node in joints.nodes]
    found: Iterator[Tensor | None] = iter(())
    try:
        if pairs and wanted:
            roots, of_roots = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(roots, wanted, of_roots, retain_graph=True, allow_unused=True))
    finally:
        for handle in handles:
            handle.remove()
    answer = tuple(next(found, None) if _differentiable(x) else None for x in inputs)
    for x, gradient in zip(inputs, answer, strict=True):
        _add(x, gradient)
    return answer, later


def backward_to_weights(later: WeightsLater) -> None:
    """Add the gradients of the weights to their `.grad`; empties `later`, which has kept the graph."""
    while later.joints:
        joints = later.joints.pop()
        if not joints.edges:
            continue
        handles = [joints.hold(node) for node in joints.passed] if len(joints.passed) > 1 else []
        try:
            found = _run(joints.edges, joints.weights)
        finally:
            for handle in handles:
                handle.remove()
        for weight, gradient in zip(joints.weights, found, strict=True):
            _add(weight, gradient)
    later.outputs.clear()


def _run(edges: Sequence[Edge], weights: Sequence[nn.Parameter]) -> Passed:
    """`torch.autograd.grad`, which in torch 2.11 asks edges for a shape that autograd.Functions cannot tell."""
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
    roots, gradients = zip(*edges, strict=True)
    wanted = tuple(map(get_gradient_edge, weights))
    # Parts of the graph may be other weights' too.
    keep_graph, create_graph, allow_unreachable, accumulate = True, False, True, False
    return engine.run_backward(roots, gradients, keep_graph, create_graph, wanted, allow_unreachable, accumulate)


def _later(outputs: list[Edge], inputs: Sequence[Tensor], weights: Iterable[nn.Parameter]) -> WeightsLater:
    """The joints of all weights that outputs depend on; weights with the same are together."""
    users = _users([edge.node for edge, _ in outputs])
    of_inputs = _reached([get_gradient_edge(x).node for x in inputs], users)
    found: dict[frozenset[Node], _Joints] = {}
    for weight in weights:
        if weight.requires_grad and (node := get_gradient_edge(weight).node) in users:
            reached = _reached([node], users, of_inputs)
            ends = [(edge, g) for edge, g in outputs if edge.node in reached - of_inputs]
            start = frozenset([*(reached & of_inputs), *(edge.node for edge, _ in ends)])
            found.setdefault(start, _Joints(reached & of_inputs, ends)).weights.append(weight)
    return WeightsLater(outputs, list(found.values()))


def _users(outputs: Sequence[Node]) -> dict[Node, list[Node]]:
    """Of every node under the outputs the nodes that use its result: the graph, turned around."""
    users: dict[Node, list[Node]] = {node: [] for node in outputs}
    ahead = list(users)
    while ahead:
        node = ahead.pop()
        for below in (x for x, _ in node.next_functions if x is not None):
            if below not in users:
                users[below] = []
                ahead.append(below)
            users[below].append(node)
    return users


def _reached(start: Sequence[Node], users: dict[Node, list[Node]], ends: Set[Node] = frozenset()) -> set[Node]:
    """The nodes under the outputs that use results of `start`, itself included; not those beyond `ends`."""
    reached = {node for node in start if node in users}
    ahead = [node for node in reached if node not in ends]
    while ahead:
        for node in users[ahead.pop()]:
            if node not in reached:
                reached.add(node)
                if node not in ends:
                    ahead.append(node)
    return reached


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _add(x: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        return
    if x.grad is None:
        x.grad = gradient
    else:
        x.grad += gradient
