"""Steps of tiny vision-language models under homes of two modules, compared with the stock model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longspan import Layout, MultimodalModel, Plan, World, plan_dynamic, plan_fixed, prepare, run_step
from longspan.doctor.stock import compute_in_float64
from longspan.model.multimodal.multimodal_model import map_stock_names
from longspan.model.vision.image_tokens import image_tokens
from longspan.testing import backend
from tests.model.stock import gradients_of, prepare_untried
from tests.model.vision.documents import Answer, documents_of
from tests.model.vision.models import config_of, tiny

BOUND = 1e-11


@dataclass(frozen=True)
class Case:
    """A model under two homes and a plan: `cp` 0 is a dynamic one; `options` are those of `prepare`.

    `planning` are options of the planner.
    """

    name: str
    home: Layout
    encoder: Layout
    cp: int = 0
    documents: str = "mixed"
    options: tuple[tuple[str, Any], ...] = ()
    planning: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        home, encoder = self.home, self.encoder
        degrees = f"tp {home.tp} pp {home.pp} cp {self.cp or 'dynamic'} of {len(home.ranks)}, encoder tp {encoder.tp}"
        planning = (str(value) for value in dict(self.planning).values())
        return " ".join([self.name, degrees, self.documents, *dict(self.options), *planning])

    def plan(self, lengths: Sequence[int], targets: int) -> Plan:
        multiple = self.home.tp if dict(self.options).get("sequence_parallel") else 1
        options: dict[str, Any] = {"targets": targets, "row_multiple": multiple, **dict(self.planning)}
        if self.cp:
            return plan_fixed(lengths, self.home, cp=self.cp, max_tokens_per_slot=-(-56 // self.cp), **options)
        return plan_dynamic(lengths, self.home, max_tokens_per_slot=max(28, 56 // self.home.slots), **options)


def errors_of(rank: int, cases: Sequence[Case], answers: Mapping[tuple[str, str], Answer]) -> dict[str, float]:
    errors = dict[str, float]()
    for case in cases:
        errors[case.label] = max(step(case, answers[case.name, case.documents], trial=not errors).values())
    return errors


def step(
    case: Case, answer: Answer, *, trial: bool = True, make: Callable[[], Any] | None = None, trains: str = ""
) -> dict[str, float]:
    """Errors of a step of the case's model, or of the one that `make` gives; names of all gradients have `trains`."""
    with compute_in_float64(), World(case.home, backend=backend(), timeout=60) as world:
        of_case = tiny(case.name) if make is None else make()
        model = (prepare if trial else prepare_untried)(of_case, world, encoder=case.encoder, **dict(case.options))
        if not trial:
            vars(model.language_model)["modes_of_row_trial"] = {False, True}
        documents = documents_of(image_tokens(config_of(case.name)), case.documents)
        result = run_step(model, case.plan(documents.lengths, documents.targets), documents, world)
        gradients = own_names(model, gradients_of(model), world)
        assert all(trains in name for name in gradients)
        return answer.errors(result.loss, gradients)


def own_names(model: MultimodalModel, tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    parts = world.control.gather_objects(dict(tensors)) if world.home.pp > 1 else [tensors]
    everything = {name: x for part in parts for name, x in part.items()}
    names = {*everything, *dict(model.named_parameters())}  # the encoder's too, where it has no gradient
    return {own: everything[name] for own, name in map_stock_names(names).items() if name in everything}
