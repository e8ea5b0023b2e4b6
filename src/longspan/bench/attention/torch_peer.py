"""torch's experimental `context_parallel` for `bench attention`: keys and values gathered, head and tail balanced.

Its module is private and differs between torch 2.11 and 2.13; whatever goes wrong is the caller's to report.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from longspan.comm import World

PEERS = ("cuDNN", "flash")
_BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
Prepared = tuple[tuple[Tensor, Tensor, Tensor], Tensor, Callable[[], Tensor], Callable[[Tensor], Tensor]]


@contextmanager
def torch_attention(peer: str, qkv: tuple[Tensor, ...], world: World, documents: int) -> Iterator[Prepared]:
    """Local inputs (1, heads, T, H), the gradient of the output, the call, and local rows to whole ones (S, heads, H).

    Raises whatever torch raises, and ValueError for what it does not offer.
    """
    if world.device.type != "cuda":
        raise ValueError("its attention kernels run on CUDA only")
    if documents > 1:
        raise ValueError("it has no packed documents")
    if qkv[0].shape[0] % (2 * len(world.plane)):
        raise ValueError(f"{qkv[0].shape[0]} rows do not divide by 2 x {len(world.plane)} ranks")
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method

    set_rotate_method("allgather")
    mesh = init_device_mesh("cuda", (len(world.plane),))
    buffers = [x.transpose(0, 1).unsqueeze(0).contiguous() for x in qkv]  # (1, heads, S, H), cut in place
    dims = [2] * len(buffers)
    with (
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers)),
        sdpa_kernel(_BACKENDS[peer]),
    ):
        q, k, v, gradient = buffers
        inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

        def whole(x: Tensor) -> Tensor:
            return context_parallel_unshard(mesh, [x], [2])[0].squeeze(0).transpose(0, 1)

        yield inputs, gradient, forward, whole
