"""What autograd holds while a layer runs forward and backward: operations with what they save, and the bytes of both.

A `Tape` is a layer's forward pass as a list of operations on tensors by name. Playing it forward and backward counts
the bytes that are alive at each operation, as autograd frees them: what an operation saved goes with its backward step,
the gradient of a tensor with the operation that made it. Sizes are bytes of all local rows together.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Work(NamedTuple):
    """Bytes that an operation holds only while it runs, forward and backward."""

    forward: float = 0.0
    backward: float = 0.0


class Operation(NamedTuple):
    """One operation: it makes `outputs`, of which the first is its result, from `inputs`.

    `saves` are the inputs or outputs that backward needs. With `through` the gradient of the result is also that of
    every input, as in a sum. `weights` are the bytes of the gradients of the operation's parameters.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    saves: tuple[str, ...]
    through: bool = False
    weights: float = 0.0
    work: Work = Work()


class Peaks(NamedTuple):
    """The most bytes of a forward pass that keeps nothing, and of a backward pass, above what is held before it."""

    forward: float
    backward: float


class Tape:
    """The operations of a layer from its input "x" to its output "y".

    >>> tape = Tape({"x": 8.0})
    >>> tape.add("product", ("x",), 24.0, saves=("x",))
    'product'
    >>> tape.bytes_saved(), tape.peaks(held=("x",)).backward
    (8.0, 32.0)

    `sizes` are bytes of tensors by name. Tensors that need no gradient are `constants`; `lasting` ones are kept even
    where the layer runs again. Gradients of a tensor with several uses are `added_in_place` one by one, or stay until
    one kernel adds them.
    """

    def __init__(self, sizes: dict[str, float], *, added_in_place: bool = True) -> None:
        """Begin with these inputs and no operation."""
        self.sizes = dict(sizes)
        self.added_in_place = added_in_place
        self.operations: list[Operation] = []
        self.constants: set[str] = set()
        self.lasting: set[str] = set()

    def add(
        self,
        output: str,
        inputs: Sequence[str],
        size: float,
        *,
        saves: Sequence[str] = (),
        also: dict[str, float] | None = None,
        through: bool = False,
        weights: float = 0.0,
        work: Work = Work(),  # noqa: B008
    ) -> str:
        """Add an operation that makes the tensor `output` of `size` bytes; return the name of that tensor.

        `also` are bytes, by name, of tensors that the operation makes only for its own backward pass: they are saved
        and need no gradient. The other arguments are fields of Operation.
        """
        assert output not in self.sizes, f"{output} is made twice"
        extra = also or {}
        self.sizes |= {output: size} | extra
        self.constants |= set(extra)
        operation = Operation(tuple(inputs), (output, *extra), (*saves, *extra), through, weights, work)
        self.operations.append(operation)
        return output

    @property
    def output(self) -> str:
        """The tensor that the last operation makes."""
        return self.operations[-1].outputs[0]

    def names_saved(self) -> set[str]:
        """Return the tensors that backward needs."""
        return {name for operation in self.operations for name in operation.saves}

    def bytes_saved(self, excluded: Collection[str] = ()) -> float:
        """Return the bytes of the tensors that backward needs, without those named in `excluded`."""
        return sum(self.sizes[name] for name in self.names_saved() if name not in excluded)

    def weight_bytes(self) -> float:
        """Return the bytes of the gradients of all parameters."""
        return sum(operation.weights for operation in self.operations)

    def peaks(self, held: Collection[str], *, again: bool = True) -> Peaks:
        """Return the peaks of the layer's passes, without the tensors `held`, which the caller counts.

        `held` are the tensors kept from the forward to the backward pass, at least the layer's input. With `again`
        backward begins with a second forward pass, which saves what backward needs. That pass stops, as torch's does,
        after the last operation that saves something, and the gradient of the layer's output waits meanwhile. Without
        `again` everything was saved by the first forward pass, and the backward peak includes it.
        """
        forward = self._forward_peak(held, frozenset())
        backward = self._backward_peak(held)
        if again:
            second_forward = self._forward_peak(held, frozenset(self.names_saved()), stop_early=True)
            backward = max(second_forward + self.sizes[self.output], backward)
        return Peaks(forward, backward)

    def _forward_peak(self, held: Collection[str], saved: frozenset[str], *, stop_early: bool = False) -> float:
        """Return the most bytes alive in a forward pass, without the tensors `held`, which the caller counts.

        A tensor is alive until its last use, one of `saved` and the layer's result to the end. With `stop_early` the
        pass ends with the last operation that saves anything, as recomputation does.
        """
        operations = self.operations
        if stop_early:
            last = max((i for i, op in enumerate(operations) if op.saves), default=-1)
            operations = operations[: last + 1]
        last_use = {name: i for i, op in enumerate(operations) for name in (*op.inputs, *op.outputs)}
        last_use[self.output] = len(operations)
        alive, peak = dict[str, float](), 0.0
        for i, operation in enumerate(operations):
            alive |= {name: self.sizes[name] for name in operation.outputs if name not in held}
            peak = max(peak, sum(alive.values()) + operation.work.forward)
            for name in list(alive):
                if last_use[name] <= i and name not in saved:
                    del alive[name]
        return peak

    def _backward_peak(self, held: Collection[str]) -> float:
        """Return the most bytes alive in a backward pass, of saved tensors and gradients; the caller counts `held`.

        Operations run in reverse. An operation makes the gradients of its inputs in new buffers; a sum passes the
        buffer of its output's gradient on instead. A second gradient of a tensor is added in place, or waits as a
        summand until the operation that made the tensor runs. After an operation the tensors that it saved are freed,
        unless an operation yet to run saved them too. Constants get no gradient; gradients of weights stay to the end.
        """
        savers_left = dict[str, int]()  # by saved tensor, how many of the operations that saved it are yet to run
        for operation in self.operations:
            for name in set(operation.saves):
                savers_left[name] = savers_left.get(name, 0) + 1
        alive = {name: self.sizes[name] for name in savers_left if name not in held}
        buffers = {0: self.sizes[self.output]}  # bytes of gradients, by number
        gradient_of = {self.output: 0}  # the buffer of a tensor's gradient; the inputs of a sum share one
        summands = dict[str, list[int]]()  # further buffers that wait to be added to a tensor's gradient
        weights = 0.0
        peak = sum(alive.values()) + buffers[0]
        for operation in reversed(self.operations):
            output = operation.outputs[0]
            buffer = gradient_of.pop(output, None)
            if buffer is None:  # the layer's result does not depend on this output
                continue
            for name in operation.inputs:
                if name in self.constants:
                    continue
                if operation.through and name not in gradient_of:  # a sum passes the buffer on
                    gradient_of[name] = buffer
                    continue
                new_buffer = len(buffers) + max(buffers)  # a number that no buffer has
                buffers[new_buffer] = 0.0 if operation.through else self.sizes[name]  # a sum makes no new gradient
                peak = max(peak, sum(alive.values()) + sum(buffers.values()) + weights + operation.work.backward)
                buffer_before = gradient_of.get(name)
                if buffer_before is None or list(gradient_of.values()).count(buffer_before) > 1:
                    gradient_of[name] = new_buffer  # the first gradient, or a sum beside a buffer that others share
                elif self.added_in_place:
                    del buffers[new_buffer]
                else:
                    summands.setdefault(name, []).append(new_buffer)
            weights += operation.weights
            peak = max(peak, sum(alive.values()) + sum(buffers.values()) + weights)
            if buffer not in gradient_of.values():
                buffers.pop(buffer, None)
            for summand in summands.pop(output, []):
                del buffers[summand]
            for name in set(operation.saves):
                savers_left[name] -= 1
                if not savers_left[name]:
                    alive.pop(name, None)
        return peak
