"""Work of updates on a GPU that begins some milliseconds after what it must wait for: what does not wait is seen."""

from typing import Any

import torch

from longspan.train.optim import offload_states

COPIES = ((offload_states._Copies, "fetch"), (offload_states._Copies, "store"))
LATE: dict[str, Any] = {
    "none": (),
    "copies": COPIES,
    "stores": COPIES[1:],
    "updates": ((offload_states._Update, "_update_bucket"),),
}


def late(method: Any) -> Any:
    """A method whose work on the GPU begins some milliseconds after what it must wait for."""

    def late_method(self: Any, *arguments: Any) -> Any:
        on_copies = isinstance(self, offload_states._Copies)
        for stream in (self._to_device, self._to_host) if on_copies else (torch.cuda.current_stream(),):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(4_000_000)
        return method(self, *arguments)

    return late_method
