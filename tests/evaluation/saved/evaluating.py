"""`longspan eval` in this process, on one rank."""

from longspan import World
from longspan.cli.eval import parse_eval, prepare_request
from longspan.evaluation.evaluate_saved import evaluate_saved
from longspan.evaluation.saved_results import SubjectResult
from longspan.layout import Layout
from longspan.train.start.start_times import Starts
from tests.model.stock import without_trials


def evaluate_here(*words: str) -> tuple[tuple[SubjectResult, ...], list[str]]:
    """The results of a command, and the lines that it logs."""
    lines = list[str]()
    _, request = prepare_request(words, parse_eval(words), 1, "cpu")
    with World(Layout(1), backend="gloo", device="cpu") as world, without_trials():
        return evaluate_saved(request, world, lines.append, lambda *_: None, Starts()), lines
