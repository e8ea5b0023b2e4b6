"""A recording keeps what the calls inside it give, call by call, and nothing outside."""

import torch
from torch import Tensor

from longspan.attention.saved_outputs import Recording, active_recording


def output(compute, inputs):
    """What a call of `attend` does that looks for a recording."""
    recording = active_recording.get()
    return compute() if recording is None else recording.output(compute, inputs)


def test_calls_are_computed_once_inside_a_recording_and_always_outside() -> None:
    computed: list[int] = []

    def call() -> float:
        def compute() -> Tensor:
            computed.append(len(computed))
            return torch.tensor(float(computed[-1]))

        return output(compute, ()).item()

    recording = Recording()
    with recording.forward():
        assert [call(), call()] == [0.0, 1.0]
    assert call() == 2.0
    for _ in range(2):  # a graph that is kept is recomputed in every backward pass
        with recording.recompute():
            assert [call(), call()] == [0.0, 1.0]
    assert call() == 3.0 and len(computed) == 4


def test_a_recording_inside_another_leaves_it_at_hand() -> None:
    outer, inner = Recording(), Recording()
    with outer.forward():
        with inner.forward():
            output(lambda: torch.tensor(1.0), ())
        output(lambda: torch.tensor(2.0), ())
    for recording, value in ((inner, 1.0), (outer, 2.0)):
        with recording.recompute():
            assert output(lambda: torch.tensor(9.0), ()).item() == value


def test_views_of_inputs_are_made_again_of_the_inputs_at_hand() -> None:
    recording, x = Recording(), torch.arange(6.0)
    with recording.forward():
        output(lambda: (x.view(2, 3)[1], x + 1), (x,))
    again = 10 * x
    with recording.recompute():
        view, stored = output(lambda: (again, again), (again,))
    assert view.tolist() == [30.0, 40.0, 50.0] and stored.tolist() == (x + 1).tolist()
