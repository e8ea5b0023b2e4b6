"""An exchange that was started, and how its result is waited for."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import Work

from longspan.comm.failure.watch import Operation

# torch's NCCL works hold what they receive, and the last work is watched until the next is waited for. From this many
# bytes on an event is watched instead, which the host records in 40 µs.
EVENT_BYTES = 64 << 20


class Handle:
    """A started exchange. `wait()` returns its result once its tensors may be used; a second call returns it again.

    On a GPU, waiting orders the current stream behind the exchange and does not stop the host. `keep` is kept alive
    until then, `finish` makes the result, `work_bytes` are the bytes that the works themselves hold on to.
    """

    __slots__ = ("_finish", "_keep", "_operation", "_result", "_work_bytes", "_works")

    def __init__(
        self,
        operation: Operation,
        works: Sequence[Work],
        keep: object = None,
        finish: Callable[[], Any] | None = None,
        work_bytes: int = 0,
    ) -> None:
        self._operation, self._works, self._keep, self._work_bytes = operation, works, keep, work_bytes
        self._finish, self._result = finish, None

    def wait(self) -> Any:
        """Wait for the exchange. Raises CommError, with a failure report, where it fails or times out."""
        if self._works:
            with self._operation as operation:
                for work in self._works:
                    work.wait()
                if self._work_bytes < EVENT_BYTES:
                    operation.watch.queued(operation, self._works)
                else:
                    operation.watch.mark(operation)
        if self._finish is not None:
            self._result = self._finish()
        self._works, self._keep, self._finish = (), None, None
        return self._result

    def then(self, finish: Callable[[Any], Any]) -> "Handle":
        """A handle of the same exchange whose result is made from this one's."""
        return Handle(self._operation, (), finish=lambda: finish(self.wait()))
