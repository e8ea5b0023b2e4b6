"""Work of the first rank alone: the others join its calls, and all get its result, or its error."""

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from longspan.comm.all_ranks import is_first_rank, leave_together
from longspan.comm.watch import error_in_one_line
from longspan.comm.world import World
from longspan.errors import CommError, LongspanError

Result = TypeVar("Result")
_RESULT = "result"
_ERROR = "error"
_MESSAGE = "work of the first rank"


class FirstRank:
    """The first rank works; the others wait, join its calls, and get its result, or its error.

    >>> first = FirstRank(world, {"weights": lambda: read_all(weights_by_name(model, world))})
    >>> rewards = first.run(lambda: reward(answers), "rewards")

    `calls` are what all ranks run together, by name (`call_on_others`). The work must not communicate in any other way.
    """

    def __init__(self, world: World, calls: Mapping[str, Callable[..., Any]]) -> None:
        self.world: World = world
        self.calls: Mapping[str, Callable[..., Any]] = calls
        self._waiting: ExitStack | None = None  # while it is open, the other ranks wait
        self._lock = threading.Lock()  # a rollout may call from threads of its own

    @property
    def is_working(self) -> bool:
        """Whether the first rank is in `run_on_first`, on that rank; false on the others."""
        return self._waiting is not None

    def run_on_first(self, work: Callable[[], Result], result_name: str) -> Result:
        """Return the first rank's result of `work`, on every rank; entered by all. Inside other work it just runs.

        Where `work` raises, so do the other ranks: its LongspanError, or for another error a CommError with its text
        and `result_name`, the result in words.
        """
        if self.is_working:
            return work()
        if not is_first_rank(self.world):
            return self._answer_first_rank()
        self._tell_others_to_wait()
        try:
            result = work()
            message = pickle.dumps((_RESULT, result))
        except BaseException as error:
            # Sending fails where another rank is gone, which then is the error at hand.
            with suppress(CommError):
                self._send(pickle.dumps((_ERROR, _make_shared_error(error, result_name))))
            self._waiting = None
            raise
        self._send(message)
        return result

    def _answer_first_rank(self) -> Any:
        """Entered by all ranks but the first, until it sends its result, which is returned, or its error."""
        while True:
            with leave_together(self.world):  # waits until the first rank leaves, too
                pass
            name, value = pickle.loads(self.world.control.broadcast_object(b"", label=_MESSAGE))
            if name == _RESULT:
                return value
            if name == _ERROR:
                raise value
            self.calls[name](*value)

    @contextmanager
    def call_on_others(self, name: str, *arguments: Any) -> Iterator[None]:
        """Have the other ranks run `calls[name](*arguments)` while the first rank, inside, takes part in that call.

        Outside of work of the first rank it does nothing: all ranks get here by themselves.
        """
        if not self.is_working:
            yield
            return
        with self._lock:
            self._send(pickle.dumps((name, arguments)))
            try:
                yield
            finally:
                self._tell_others_to_wait()

    def _tell_others_to_wait(self) -> None:
        """The other ranks wait in `leave_together` until this rank leaves it, to send something."""
        self._waiting = ExitStack()
        self._waiting.enter_context(leave_together(self.world))

    def _send(self, message: bytes) -> None:
        waiting = self._waiting
        self._waiting = None
        assert waiting is not None
        waiting.close()
        self.world.control.broadcast_object(message, label=_MESSAGE)


def _make_shared_error(error: BaseException, result_name: str) -> LongspanError:
    """A LongspanError that pickles stays as it is."""
    if isinstance(error, LongspanError):
        with suppress(Exception):
            return pickle.loads(pickle.dumps(error))
    return CommError(f"the first rank, which makes {result_name} for all, failed with {error_in_one_line(error)}")
