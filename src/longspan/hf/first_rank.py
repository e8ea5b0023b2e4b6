"""Work of a Trainer that the first rank does for all: answers, rewards, tools.

The others wait for its result, however long it takes, and take part in the calls of all ranks that the work makes,
such as gathering weights. The work itself runs on the first rank only and must not communicate in any other way.
"""

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from longspan.comm import World
from longspan.comm.all_ranks import is_first_rank, leave_together
from longspan.comm.watch import one_line
from longspan.errors import CommError, LongspanError

Result = TypeVar("Result")
_RESULT, _ERROR, _MESSAGE = "result", "error", "work of the first rank"


class FirstRank:
    """The first rank works; the others wait, join its calls, and get its result, or its error.

    >>> first = FirstRank(world, {"weights": lambda: read_all(weights_by_name(model, world))})
    >>> rewards = first.run(lambda: reward(answers), "rewards")

    `calls` are what all ranks run together, by name (`call_on_others`). Results travel by pickle.
    """

    def __init__(self, world: World, calls: Mapping[str, Callable[..., Any]]) -> None:
        self._world, self._calls = world, calls
        self._waiting: ExitStack | None = None  # while it is open, the other ranks wait
        self._lock = threading.Lock()  # a rollout may call from threads of its own

    @property
    def is_working(self) -> bool:
        """Whether this is the first rank, and in the middle of its work, while the others only wait."""
        return self._waiting is not None

    def run(self, work: Callable[[], Result], what: str) -> Result:
        """Return the result of `work` on the first rank, on every rank; entered by all. Inside other work it just runs.

        Where the work raises, the first rank raises its error; the others raise the same one if it is a LongspanError,
        else CommError with its text and `what`, words for the work's result.
        """
        if self.is_working:
            return work()
        if not is_first_rank(self._world):
            return self._answer_calls_of_first()
        self._let_others_wait()
        try:
            result = work()
            message = pickle.dumps((_RESULT, result))
        except BaseException as error:
            with suppress(CommError):  # another rank is gone, which is what failed here
                self._send(pickle.dumps((_ERROR, _make_shared_error(error, what))))
            self._waiting = None
            raise
        self._send(message)
        return result

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
                self._let_others_wait()

    def _let_others_wait(self) -> None:
        """Keep the other ranks waiting, from here until `_send`, however long that takes."""
        self._waiting = ExitStack()
        self._waiting.enter_context(leave_together(self._world))

    def _send(self, message: bytes) -> None:
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        waiting.close()
        self._world.control.broadcast_object(message, what=_MESSAGE)

    def _answer_calls_of_first(self) -> Any:
        """Take part in what the first rank calls, until it sends its result or its error; return or raise that."""
        while True:
            with leave_together(self._world):  # waits until the first rank leaves, too
                pass
            name, value = pickle.loads(self._world.control.broadcast_object(b"", what=_MESSAGE))
            if name == _RESULT:
                return value
            if name == _ERROR:
                raise value
            self._calls[name](*value)  # what `call_on_others` sent: a name and arguments


def _make_shared_error(error: BaseException, what: str) -> LongspanError:
    """Return the error that the other ranks raise for one of the first: the same if it pickles, else a CommError."""
    if isinstance(error, LongspanError):
        with suppress(Exception):
            return pickle.loads(pickle.dumps(error))
    return CommError(f"the first rank, which makes {what} for all, failed with {one_line(error)}")
