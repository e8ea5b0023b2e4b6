"""What torch's allocator does in steps that nearly fill a GPU: memory that it gives back and takes again, simulated.

    python bench/training/stream_pools.py                                   # Qwen3-8B over two H200s
    python bench/training/stream_pools.py --out bench/records/stream-pools.md

The allocator (growing segments, torch 2.11 to 2.13: CUDACachingAllocator.cpp) has blocks for each stream. A request
takes the smallest free block of its stream that is large enough, else maps more memory at the first place of its
segment; where the device has no more, all free blocks of all streams are given back first, after a wait for the device.
The steps are those of FSDP2 over layers that keep all, with sums of gradients on a stream of their own or on the one
that computes. Sizes are Qwen3-8B's in bfloat16. Small blocks and what kernels hold besides are left out.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MB, PAGE = 10**6, 20 << 20  # PAGE is what is mapped at a time
State = Literal["used", "free", "hole"]
WEIGHTS = (33.6, 8.4, 8.4, 33.6, 100.7, 100.7, 100.7)  # MB of a layer in bfloat16: q, k, v, o, gate, up, down
ROOT = 2489.0  # of embedding and head
WIDE, KEYS, MLP = 134.2, 33.6, 402.7  # of 16,384 rows: hidden states, keys, the MLP's width
KEPT = (WIDE, WIDE, WIDE, KEYS, WIDE, KEYS, KEYS, WIDE, 2.1, WIDE, WIDE, MLP, MLP, MLP)  # of a layer for its backward
TITLES = (
    "micro-batches a step",
    "sums of gradients",
    "most in use",
    "retries a step",
    "mapped again a step",
    "mapped at most",
)


NOTE = """\
`python bench/training/stream_pools.py --out bench/records/stream-pools.md`: no GPU and no torch, only the allocator's
rules (best fit in a stream's free blocks, growing segments, all free memory of all streams given back before a
request fails) over the requests of Qwen3-8B's steps on one of two H200s, 16,384 rows a GPU. 91.4 GiB are left of
139.8 next to weights, states, context and communicators. A retry is a wait for the device; memory is mapped in pages
of 20 MiB, each a call of the driver.

With sums on FSDP2's own stream, a step of one micro-batch that fills the GPU gives back and takes again some 90 GiB,
4,700 pages. With sums on the stream that computes it takes nothing, and holds less. With two micro-batches, whose
gradients are there when most is in use, both are alike: gradients between activations leave no gaps that matter.

What is measured beside it (step-32k-2xH200.md): one micro-batch with sums on FSDP2's stream was idle for 469 ms of a
step, with sums on the stream that computes for 16, without a retry; a packed step of two for 18."""


@dataclass
class Block:
    """A run of addresses of one stream's segment."""

    size: int
    state: State


@dataclass
class Device:
    """A GPU's memory, of which so many bytes are for what steps take; counts since `reset`."""

    room: int
    segments: dict[str, list[Block]] = field(default_factory=dict[str, list[Block]])
    mapped: int = 0
    in_use: int = 0
    retries: int = 0
    mapped_again: int = 0
    most_mapped: int = 0
    most_in_use: int = 0

    def reset(self) -> None:
        """Count from 0."""
        self.retries = self.mapped_again = self.most_mapped = self.most_in_use = 0

    def take(self, stream: str, megabytes: float) -> Block:
        """Return a block of a stream."""
        size = -(-int(megabytes * MB) // 512) * 512
        segment = self.segments.setdefault(stream, [])
        block = _take_free(segment, size) or self._map(segment, size)
        if block is None:
            self.retries += 1
            for other in self.segments.values():
                self.mapped -= sum(b.size for b in other if b.state == "free")
                _change_free_to_holes(other)
            block = self._map(segment, size)
            assert block is not None, "out of memory"
        self.in_use += block.size
        self.most_in_use = max(self.most_in_use, self.in_use)
        return block

    def free(self, *blocks: Block) -> None:
        """Free blocks, and join them with free neighbours."""
        for block in blocks:
            assert block.state == "used"
            block.state = "free"
            self.in_use -= block.size
        for segment in self.segments.values():
            _join(segment)

    def _map(self, segment: list[Block], size: int) -> Block | None:
        """Map memory at the first place of a segment that has so many addresses, free ones before it included."""
        start = 0
        while start < len(segment):
            end, total, holes = start, 0, 0
            while end < len(segment) and segment[end].state != "used" and total < size:
                total, holes = total + segment[end].size, holes + (segment[end].state == "hole")
                end += 1
            reaches_end = end == len(segment)
            if (total >= size and holes) or (total < size and reaches_end and end > start):
                return self._map_range(segment, start, end, size)
            start = end + 1 if end > start else start + 1
        return self._map_range(segment, len(segment), len(segment), size)

    def _map_range(self, segment: list[Block], start: int, end: int, size: int) -> Block | None:
        """Make blocks start to end of a segment, and addresses behind it if they are too few, one used block."""
        free = sum(b.size for b in segment[start:end] if b.state == "free")
        total = sum(b.size for b in segment[start:end])
        fresh = -(-(size - free) // PAGE) * PAGE
        if self.mapped + fresh > self.room:
            return None
        self.mapped += fresh
        self.mapped_again += fresh
        self.most_mapped = max(self.most_mapped, self.mapped)
        block, rest = Block(size, "used"), [Block(free + fresh - size, "free")] if free + fresh > size else []
        if total > free + fresh:
            rest.append(Block(total - free - fresh, "hole"))
        segment[start:end] = [block, *rest]
        return block


def _take_free(segment: list[Block], size: int) -> Block | None:
    """Take the smallest free block that is large enough; what is left of it stays free."""
    places = [i for i, block in enumerate(segment) if block.state == "free" and block.size >= size]
    if not places:
        return None
    i = min(places, key=lambda place: segment[place].size)
    block = segment[i]
    if block.size - size > 1 << 20:
        segment.insert(i + 1, Block(block.size - size, "free"))
        block.size = size
    block.state = "used"
    return block


def _join(segment: list[Block]) -> None:
    joined: list[Block] = []
    for block in segment:
        if joined and block.state == joined[-1].state != "used":
            joined[-1].size += block.size
        else:
            joined.append(block)
    segment[:] = joined


def _change_free_to_holes(segment: list[Block]) -> None:
    for block in segment:
        block.state = "hole" if block.state == "free" else block.state
    _join(segment)


@dataclass
class Step:
    """Steps of a model whose layers keep all, in micro-batches, with sums on a stream; `gradients` by layer."""

    device: Device
    layers: int
    micro_batches: int
    sums: str  # the stream of sums: "sums" or "compute"
    gradients: dict[int, Block] = field(default_factory=dict[int, Block])

    def run(self) -> None:
        """Run one step with its update, after which gradients are freed."""
        for _ in range(self.micro_batches):
            self._run_micro_batch()
        self.device.free(*self.gradients.values())
        self.gradients.clear()

    def _run_micro_batch(self) -> None:
        device, kept = self.device, list[list[Block]]()
        root = self._gather(ROOT)
        for _ in range(self.layers):
            weights = [block for size in WEIGHTS for block in self._gather(size)]
            layer = list[Block]()
            for size in KEPT:
                layer.append(device.take("compute", size))
                passing = device.take("compute", WIDE)
                device.free(passing)
            gathered_keys = [device.take("compute", 2 * KEYS) for _ in range(4)]
            device.free(*gathered_keys, *weights)
            kept.append(layer)
        logits = [device.take("compute", 2074.0) for _ in range(3)]
        device.free(*logits)
        message, gradient = None, device.take("compute", WIDE)
        for i in reversed(range(self.layers)):
            message, gradient = self._run_backward(i, kept.pop(), message, gradient)
        message = self._sum(-1, [device.take("compute", ROOT)], message)
        device.free(message, gradient, *root)

    def _run_backward(
        self, layer: int, kept: list[Block], message: Block | None, gradient: Block
    ) -> tuple[Block, Block]:
        device = self.device
        weights = [block for size in WEIGHTS for block in self._gather(size)]
        of_weights = list[Block]()
        wide = [device.take("compute", MLP) for _ in range(3)]
        device.free(*kept[-3:])
        of_weights += [device.take("compute", size) for size in WEIGHTS[4:]]
        device.free(*wide)
        of_attention = [device.take("compute", size) for size in (WIDE, 2 * WIDE, 2 * WIDE, 4 * KEYS, 4 * KEYS, KEYS)]
        of_weights += [device.take("compute", size) for size in WEIGHTS[:4]]
        following = device.take("compute", WIDE)
        device.free(*of_attention, gradient, *kept[:-3], *weights)
        return self._sum(layer, of_weights, message), following

    def _gather(self, megabytes: float) -> Iterator[Block]:
        """Gather weights: they arrive on the stream of gathers, and are laid out on the one that computes."""
        arriving = self.device.take("gathers", megabytes)
        weights = self.device.take("compute", megabytes)
        self.device.free(arriving)
        return iter([weights])

    def _sum(self, layer: int, gradients: list[Block], before: Block | None) -> Block:
        """Sum gradients in float32 over two slots; returns the message, which is freed with the next one."""
        size = sum(block.size for block in gradients) / MB
        message = self.device.take("compute", 2 * size)
        self.device.free(*gradients)
        total = self.device.take(self.sums, size)
        if layer in self.gradients:
            self.device.free(total)
        else:
            self.gradients[layer] = total
        if before is not None:
            self.device.free(before)
        return message


def measure(layers: int, micro_batches: int, sums: str, room: int, steps: int = 3) -> tuple[str, ...]:
    """Run some steps after two, and return a row of the table."""
    device = Device(room)
    step = Step(device, layers, micro_batches, sums)
    for i in range(2 + steps):
        if i == 2:
            device.reset()
        step.run()
    sizes = (device.most_in_use, device.mapped_again / steps, device.most_mapped or device.mapped)
    in_use, again, most = (f"{size / 2**30:.1f} GiB" for size in sizes)
    where = {"sums": "on a stream of their own", "compute": "on the stream that computes"}[sums]
    return (f"{micro_batches} ({layers} layers)", where, in_use, f"{device.retries / steps:.1f}", again, most)


def main() -> None:
    from longspan.plain_text import markdown_table, text_table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="31,32,34", help="that keep all, in steps of one micro-batch")
    parser.add_argument("--packed", default="28", help="the same in steps of two, in which gradients are there before")
    parser.add_argument("--room", type=float, default=91.4, help="GiB for all but weights, states and communicators")
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    cases = [
        (int(layers), count) for count, words in ((1, flags.layers), (2, flags.packed)) for layers in words.split(",")
    ]
    rows = [measure(*case, sums, int(flags.room * 2**30)) for case in cases for sums in ("sums", "compute")]
    print(text_table(TITLES, rows, left=2))
    if flags.out:
        text = f"# Memory that steps give back and take again, simulated\n\n{markdown_table(TITLES, rows)}\n\n{NOTE}\n"
        flags.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
