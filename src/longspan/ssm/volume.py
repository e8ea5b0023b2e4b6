"""What a scan's members give each other in one forward pass of a layer, from the lengths alone."""

import torch

from longspan.comm import ShardPart
from longspan.errors import LayoutError
from longspan.plan import Group
from longspan.ssm.chains import Chains

_CPU = torch.device("cpu")


def state_bytes(
    group: Group, *, heads: int, key_size: int, value_size: int, delta: bool = True, bytes_per_number: int = 4
) -> int:
    """Bytes of states and transitions that all members of a group together give in a forward pass.

    Each member receives those of all others. A run of rows that is not its document's last gives its state, heads ·
    key_size · value_size numbers; one that is not the first either gives its transition besides, heads · key_size²
    under a delta rule (`delta`), heads otherwise. How many rows there are does not matter.

    >>> one = Group((0, 1, 2, 3), (0,), (65536,), partition="contiguous")
    >>> state_bytes(one, heads=32, key_size=128, value_size=128) >> 20
    10

    Raises LayoutError for sizes below 1.
    """
    sizes = {"heads": heads, "key_size": key_size, "value_size": value_size, "bytes_per_number": bytes_per_number}
    if wrong := [f"{name}={size}" for name, size in sizes.items() if size < 1]:
        raise LayoutError(f"state_bytes got {', '.join(wrong)}; each is at least 1")
    chains = Chains(ShardPart(group, 0, group.slots[0], 0, world_key=-1), _CPU)
    of_a_head = sum(chains.forward.counts(key_size * value_size, key_size**2 if delta else 1))
    return of_a_head * heads * bytes_per_number
