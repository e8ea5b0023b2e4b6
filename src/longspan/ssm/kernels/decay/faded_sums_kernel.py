"""The kernel of `faded_sums`; imported where Triton is."""

# pyright: basic, reportMissingImports=false
import triton
import triton.language as tl


@triton.jit
def faded_sums_kernel(
    added,
    decays,
    states,
    final,
    into,
    chunk_ends,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """One program has BLOCK of a head's numbers, of one run, and goes through its chunks."""
    head = tl.program_id(1)
    run = tl.program_id(2).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE * WIDTH
    row, column = place // WIDTH, place % WIDTH
    of_added = (head // SHARED) * SIZE * SHARED * WIDTH + row * SHARED * WIDTH + (head % SHARED) * WIDTH + column
    of_state = head * SIZE * WIDTH + place
    first, last = tl.load(chunk_ends + run), tl.load(chunk_ends + run + 1)
    state = tl.load(states + run * HEADS * SIZE * WIDTH + of_state, mask=inside, other=0.0)
    for step in range(last - first):
        chunk = last - 1 - step if BACKWARDS else first + step
        if KEEP:
            kept = into + chunk * HEADS * SIZE * WIDTH + of_state
            tl.store(kept, state.to(kept.dtype.element_ty), mask=inside)
        fading = tl.exp2(tl.load(decays + chunk * HEADS + head))
        new = tl.load(added + chunk * HEADS * SIZE * WIDTH + of_added, mask=inside, other=0.0)
        state = fading * state + new
    tl.store(final + run * HEADS * SIZE * WIDTH + of_state, state, mask=inside)
