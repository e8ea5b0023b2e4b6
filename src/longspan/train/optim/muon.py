"""Muon for the matrices of layers, and AdamW in one pass for the rest, over sharded parameters.

The formula is that of torch.optim.Muon, which takes whole matrices alone. Here updates of equal matrices travel in
bundles: each rank gathers a share of the matrices, orthogonalizes these, and sends everybody's rows back, while the
next bundle's rows arrive.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from longspan.comm.meshes import exchange_tensors
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan.memory.settings import BUNDLE_NUMBERS
from longspan.train.optim.adamw_updates import Update
from longspan.train.optim.one_pass_adamw import OnePassAdamW

EPS = 1e-7  # least norm of a matrix, as in torch
HALVED = 2048  # rows from which symmetric products are computed in halves: a quarter fills a GPU
_IN_LAYER = re.compile(r"(^|\.)\d+\.")
_NO_MATRIX = re.compile(r"a_log$|conv\w*\.weight$")  # decays of a state-space layer, and kernels of convolutions


def is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix inside a numbered layer, or one for each expert (n, rows, columns).

    >>> is_layer_matrix("model.layers.0.mlp.gate_proj.weight", torch.zeros(8, 4))
    True

    So are an adapter's two matrices, and routers; embeddings, heads, single rows and kernels of convolutions are not.
    """
    shaped = parameter.ndim in (2, 3) and min(parameter.shape[-2:]) > 1
    return shaped and bool(_IN_LAYER.search(name)) and not _NO_MATRIX.search(name.lower())


class Muon(OnePassAdamW):
    """Muon for groups with `is_matrix`, AdamW with `betas` and `eps` for the others, both with `lr` and decay.

    `adjust_lr_fn`: "match_rms_adamw" (as Moonshot, updates as large as AdamW's, so that one rate fits both) or
    "original". Products are in bfloat16, as torch's, and in float64 for float64. Entered by all ranks that share
    parameters.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        """Take parameters or groups of them, with AdamW's arguments and those of torch.optim.Muon. Raises ValueError
        for values that make no sense.
        """
        if adjust_lr_fn not in ("original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn is {adjust_lr_fn!r}; use original or match_rms_adamw")
        if not 0 <= momentum < 1 or len(ns_coefficients) != 3:
            raise ValueError(
                f"momentum {momentum} is not below 1, or ns_coefficients are {ns_coefficients}, not three"
            )
        super().__init__(params, lr, betas, eps, weight_decay)
        settings: dict[str, Any] = {"is_matrix": False, "momentum": momentum, "nesterov": nesterov}
        settings |= {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        self.defaults |= settings
        for group in self.param_groups:
            group |= settings | group

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)  # Adam's looks for a count of steps in each state

    def apply(self, updates: Sequence[Update]) -> None:
        """Make AdamW's updates, then Muon's of all matrices with gradients, bundle by bundle; entered by all ranks that
        share them.

        Nothing changes where the scale of gradients is not a number.
        """
        super().apply(updates)
        scale = self.gradient_scale
        if scale is not None and bool(scale.isnan()):
            return
        # All ranks have the same bundles in one order.
        begun = list[Iterator[None]]()
        # Matrices of a mesh so far, by which its ranks take turns in having one more than others. Each mesh has a count
        # of its own: its ranks may have different matrices on other meshes, as pipeline stages that share encoders do.
        turns = Counter[Any]()
        for group in self.param_groups:
            for bundle in _cut_bundles(group):
                mesh = getattr(bundle[0], "device_mesh", None)
                begun = _advance_bundles([self._update_bundle(bundle, group, turns[mesh]), *begun])
                turns[mesh] += len(bundle)
        while begun:
            begun = _advance_bundles(begun)

    def _update_bundle(self, bundle: Sequence[Tensor], group: dict[str, Any], turn: int) -> Iterator[None]:
        """The generator pauses at each exchange with other ranks. `turn` counts the matrices of this mesh before it,
        by which ranks take turns in having one more than others."""
        first = local_tensor(bundle[0].detach())
        dtype = torch.float64 if first.dtype == torch.float64 else torch.bfloat16
        updates = first.new_empty((len(bundle), *first.shape), dtype=dtype)
        for parameter, update in zip(bundle, updates, strict=True):
            assert parameter.grad is not None
            gradient = local_tensor(parameter.grad)
            if self.gradient_scale is not None:
                gradient = gradient * self.gradient_scale
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            momentum = local_tensor(state["momentum_buffer"])
            momentum.lerp_(gradient, 1 - group["momentum"])
            update.copy_(gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum)
        rows, columns = bundle[0].shape[-2:]
        matched = group["adjust_lr_fn"] == "match_rms_adamw"
        ratio = 0.2 * math.sqrt(max(rows, columns)) if matched else math.sqrt(max(1, rows / columns))
        updates = yield from _orthogonalize_bundle(updates, _list_axes(bundle[0]), group, turn)
        for parameter, update in zip(bundle, updates, strict=True):
            local = local_tensor(parameter.detach())
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update, alpha=-group["lr"] * ratio)


def _advance_bundles(begun: Sequence[Iterator[None]]) -> list[Iterator[None]]:
    """The newest bundle is first, so that rows travel while others are multiplied. Returns the unfinished ones."""
    finished = object()  # a bundle yields None at each exchange
    return [bundle for bundle in begun if next(bundle, finished) is not finished]


def _cut_bundles(group: dict[str, Any]) -> Iterator[list[Tensor]]:
    """A bundle has as many matrices as BUNDLE_NUMBERS per rank allow, and at least one for each rank that shares
    them, except a last one."""
    alike = defaultdict[Any, list[Tensor]](list)
    for parameter in group["params"] if group["is_matrix"] else ():
        if parameter.grad is not None:
            sharding = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else ()
            alike[sharding, parameter.shape, parameter.dtype].append(parameter)
    for parameters in alike.values():
        first = parameters[0]
        ranks = first.device_mesh.size() if isinstance(first, DTensor) else 1
        count = max(ranks if _list_axes(first) else 1, BUNDLE_NUMBERS * ranks // first.numel())
        yield from (parameters[start : start + count] for start in range(0, len(parameters), count))


class _MeshAxis(NamedTuple):
    """The ranks along an axis of a mesh, and how they cut `dim` of a parameter (None: each holds all of it) into
    `sizes`.
    """

    group: ProcessGroup
    rank: int
    dim: int | None
    sizes: list[int]


def _list_axes(parameter: Tensor) -> list[_MeshAxis]:
    """The last axis cuts the whole matrix, and each axis before it what is left; see `local_block`. Axes that divide
    experts are left out: each rank has whole matrices of its own."""
    axes = list[_MeshAxis]()
    shape = [*parameter.shape]
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    for axis in reversed(range(mesh.ndim if mesh is not None else 0)):
        assert mesh is not None and isinstance(parameter, DTensor)
        ranks = mesh.size(axis)
        index = mesh.get_local_rank(axis)
        dim = getattr(parameter.placements[axis], "dim", None)
        sizes = [0] * ranks
        if dim is not None:
            step = -(-shape[dim] // ranks)
            sizes = [max(0, min(step, shape[dim] - step * member)) for member in range(ranks)]
            shape[dim] = sizes[index]
        if ranks > 1 and (dim is None or dim >= parameter.ndim - 2):  # experts are whole matrices
            axes.insert(0, _MeshAxis(mesh.get_group(axis), index, dim, sizes))
    return axes


def _orthogonalize_bundle(
    bundle: Tensor, axes: Sequence[_MeshAxis], group: dict[str, Any], turn: int
) -> Generator[None, None, Tensor]:
    """Ranks along the first of `axes` share the matrices (matrices, …) out: each gathers its share, so that the
    share is cut along the other axes only, orthogonalizes it along these, and sends rows back. The generator
    pauses while rows travel."""
    if not axes:
        numbers = max(1, bundle.shape[-2] * bundle.shape[-1])
        parts = bundle.reshape(-1, *bundle.shape[-2:]).split(max(1, BUNDLE_NUMBERS // numbers))
        orthogonal_parts = [orthogonalize(part, group["ns_coefficients"], group["ns_steps"]) for part in parts]
        return torch.cat(orthogonal_parts).view(bundle.shape)
    axis, *other_axes = axes
    ranks = len(axis.sizes)
    each, left_over = divmod(len(bundle), ranks)
    shares = [each + 1 if (member - turn) % ranks < left_over else each for member in range(ranks)]
    parts = bundle.split(shares)
    if axis.dim is None:  # copies: the rank has all of its share
        own_share = yield from _orthogonalize_bundle(parts[axis.rank], other_axes, group, turn // ranks)
        sends = [own_share] * ranks
    else:
        dim = axis.dim + 1
        share_shape = [shares[axis.rank], *bundle.shape[1:]]
        shapes = [(*share_shape[:dim], size, *share_shape[dim + 1 :]) for size in axis.sizes]
        whole = torch.cat((yield from exchange_tensors(parts, shapes, axis.group)), dim)
        sends = (yield from _orthogonalize_bundle(whole, other_axes, group, turn // ranks)).split(axis.sizes, dim)
    return torch.cat((yield from exchange_tensors(sends, [(n, *bundle.shape[1:]) for n in shares], axis.group)))


def orthogonalize(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Bring the singular values of matrices x (n, rows, columns) near 1: Newton-Schulz's iteration, as in torch."""
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = _symmetric_product(x, x.mT)
        gram = _symmetric_product(gram, gram, onto=gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


def _symmetric_product(
    x: Tensor, y: Tensor, onto: Tensor | None = None, beta: float = 0, alpha: float = 1
) -> Tensor:
    """alpha · x y + beta · onto, symmetric, (n, rows, rows). Of large ones a quarter is copied from its mirror."""
    product = x.new_empty((*x.shape[:-1], x.shape[-2]))
    # torch does not read `onto` where beta is 0.
    onto = product if onto is None else onto
    rows = x.shape[-2]
    half = rows // 2 if rows >= HALVED else rows
    blocks = [(slice(None), slice(half))]  # (rows, columns) of the results: the left half
    if half < rows:
        # The lower right quarter is computed too.
        blocks.append((slice(half, None), slice(half, None)))
    for at_rows, at_columns in blocks:
        place = (slice(None), at_rows, at_columns)
        torch.baddbmm(onto[place], x[:, at_rows], y[..., at_columns], beta=beta, alpha=alpha, out=product[place])
    product[:, :half, half:] = product[:, half:, :half].mT
    return product
