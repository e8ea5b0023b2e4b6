"""A backward pass in two parts, for zero-bubble schedules: the gradient of a stage's input first, of its weights later.

The idea is that of Zero Bubble Pipeline Parallelism (Qi et al., arXiv:2401.10241) and of torch's
`pipelining._backward`: at the nodes of the graph where the paths from a weight to the output meet the paths from the
input, the first part keeps the gradients that pass, and the second part goes on from there to the weight only.

This is our own code because torch's does not serve these stages. In torch 2.11 its second part cannot start at an
autograd.Function, such as our attention and our loss: it raises an error for every zero-bubble case of
tests/train/steps/test_pipelined.py, and gives wrong gradients where a node has several outputs. torch 2.13's passes
these cases, and raises an error where a weight is used twice on a stage. Once the oldest torch that we support passes
tests/model/pipeline/test_split_backward.py, torch's can take this one's place.
"""

from collections.abc import Iterable, Set
from functools import partial
from operator import setitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from longspan.model.weights.local_tensors import add_gradient


class PendingWeights(NamedTuple):
    """What the gradients of a stage's weights are computed from later. `output` keeps the graph alive.

    `groups` are the weights by the nodes where their paths meet those of the input; `gradients` are the gradients that
    reached each node, one for each output of the node.
    """

    output: GradientEdge
    groups: dict[frozenset[Node], list[Tensor]]
    gradients: dict[Node, tuple[Tensor | None, ...]]


def compute_input_gradient(
    output: Tensor, gradient: Tensor | None, x: Tensor, weights: Iterable[Tensor]
) -> tuple[Tensor, PendingWeights]:
    """Compute the gradient of the input `x`; returns it, and the record for `compute_weight_gradients`.

    `weights` are the leaves whose gradients come later. `gradient` is that of the output, None if the output is a loss.
    """
    edge = get_gradient_edge(output)
    pending = PendingWeights(edge, _group_weights(edge.node, get_gradient_edge(x).node, weights), {})
    nodes = frozenset[Node]().union(*pending.groups)
    # A prehook gets the gradients that have reached its node: they are recorded for the second part.
    handles = [node.register_prehook(partial(setitem, pending.gradients, node)) for node in nodes]
    try:
        (input_gradient,) = torch.autograd.grad(output, x, gradient, retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return input_gradient, pending


def compute_weight_gradients(pending: PendingWeights) -> None:
    """Compute the gradients of the weights, added to their `.grad`; empties `pending`."""
    while pending.groups:
        nodes, weights = pending.groups.popitem()
        gradients = {node: pending.gradients[node] for node in nodes if node in pending.gradients}
        # A node's recorded gradient includes what reached it through other nodes of the group. Backward from all of
        # them would add that again, so hooks set each node's gradient to the recorded one.
        hooks = gradients.items() if len(gradients) > 1 else ()
        handles = [node.register_prehook(lambda _, passed=passed: passed) for node, passed in hooks]
        try:
            _add_gradients(gradients, weights)
        finally:
            for handle in handles:
                handle.remove()
    pending.gradients.clear()


def _add_gradients(gradients: dict[Node, tuple[Tensor | None, ...]], weights: list[Tensor]) -> None:
    """Run backward from these nodes to only these weights, and add to their `.grad`.

    `torch.autograd.grad` does the same, but in torch 2.11 it reads the shapes of nodes, which autograd.Functions lack.
    """
    edges = {
        GradientEdge(node, i): gradient
        for node, gradient_of_node in gradients.items()
        for i, gradient in enumerate(gradient_of_node)
        if gradient is not None
    }
    if not edges:
        return
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
    targets = tuple(map(get_gradient_edge, weights))
    # Other weights may need the same part of the graph, so it is kept.
    keep_graph, create_graph, allow_unreachable, accumulate = True, False, True, False
    flags = keep_graph, create_graph, targets, allow_unreachable, accumulate
    for weight, gradient in zip(weights, engine.run_backward(tuple(edges), tuple(edges.values()), *flags), strict=True):
        add_gradient(weight, gradient)


def _group_weights(output: Node, x: Node, weights: Iterable[Tensor]) -> dict[frozenset[Node], list[Tensor]]:
    """All nodes on a path from the input depend on it; the search from a weight stops at the first of them."""
    users = _find_users(output)
    input_users = _dependent_nodes(x, users)
    groups: dict[frozenset[Node], list[Tensor]] = {}
    for weight in weights:
        if weight.requires_grad and (node := get_gradient_edge(weight).node) in users:
            groups.setdefault(frozenset(_dependent_nodes(node, users, input_users) & input_users), []).append(weight)
    return groups


def _find_users(output: Node) -> dict[Node, list[Node]]:
    """Find, for every node that the output depends on, the nodes that use its result: the graph turned around."""
    users: dict[Node, list[Node]] = {output: []}
    to_visit = [output]
    while to_visit:
        node = to_visit.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in users:
                users[below] = []
                to_visit.append(below)
            users[below].append(node)
    return users


def _dependent_nodes(start: Node, users: dict[Node, list[Node]], last_nodes: Set[Node] = frozenset()) -> set[Node]:
    dependents, to_visit = {start}, [start]
    while to_visit:
        node = to_visit.pop()
        following = () if node in last_nodes else users.get(node, ())
        new_nodes = [user for user in following if user not in dependents]
        dependents.update(new_nodes)
        to_visit += new_nodes
    return dependents
