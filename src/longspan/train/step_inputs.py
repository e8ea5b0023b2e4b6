"""What a step runs over: a model, a plan and its documents, counted and checked before a token is read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from longspan.comm import World
from longspan.data.document import count_targets
from longspan.errors import DataError, LossError, ModelError, PlanError, plural
from longspan.model.exactness.row_trial import try_rows
from longspan.model.kinds import score_columns
from longspan.model.marks import has_weights_on_host, is_multimodal, is_pipeline, waits_on_host
from longspan.model.seams.call_rules import call_rules, refuse_documents_beyond_positions, refuse_unprepared_model
from longspan.model.seams.randomness import refuse_randomness
from longspan.plan import Plan
from longspan.train.optim.offload_states import OffloadedStates

if TYPE_CHECKING:
    from longspan.plan.items.item_table import ItemTable


class StepDocuments:
    """The documents of one plan: indexed by document, with the facts about them that all ranks count once.

    `documents` is what the caller gave, `lengths` the plan's tokens of each. `items` are the places that encoders fill;
    None for a model without encoders. Raises DataError or ModelError where documents and encoders do not belong
    together.
    """

    def __init__(self, model: nn.Module, documents: Any, lengths: Sequence[int]) -> None:
        """Take the documents of a plan of these `lengths`; none is read, and targets are counted when they are first
        asked for.
        """
        self.documents: Any = documents
        self._makes_scores = score_columns(getattr(model, "language_model", model)) > 0
        self.lengths: tuple[int, ...] = tuple(lengths)
        # Documents that continue another are here once they are counted.
        self._parents: dict[int, int] = {}
        given_items = getattr(documents, "items", None)
        if callable(given_items):  # a dict of documents has a method of this name
            given_items = None
        self.items: ItemTable | None = None
        if is_multimodal(model):
            from longspan.data.item_documents import find_item_table

            self.items = find_item_table(documents, lengths)
            if self.items is None:
                raise DataError(
                    f"the documents ({type(documents).__name__}) have no items; a MultimodalModel takes "
                    "MediaDocuments, with an empty list of items where there are none"
                )
        elif given_items is not None and len(given_items):
            raise ModelError(
                f"the documents have {len(given_items)} items, {type(model).__name__} has no encoder; run a "
                "MultimodalModel(encoders, language_model, world)"
            )

    def __getitem__(self, document: int) -> Any:
        return self.documents[document]

    @cached_property
    def targets_by_document(self) -> tuple[int, ...]:
        """The number of tokens that each document predicts, counted on first use from labels alone.

        Raises PlanError for a document that is missing or of another length, DataError for one that the model's head
        does not take. Counting also notes which documents continue another.
        """
        counts = list[int]()
        for document, length in enumerate(self.lengths):
            try:
                value = self.documents[document]
            except (IndexError, KeyError) as error:
                raise PlanError(
                    f"the plan has {len(self.lengths)} documents, document {document} was not given"
                ) from error
            if isinstance(value, Mapping):
                raise PlanError(
                    f"document {document} is a {type(value).__name__} of {', '.join(map(str, value))}; give its token "
                    "ids, or longspan.Document(ids, labels=…) where not every token is a target"
                )
            if getattr(value, "makes_scores", False) != self._makes_scores:
                text = (
                    "makes scores of rows" if self._makes_scores else "predicts tokens, and has no head of scores"
                )
                raise DataError(
                    f"document {document} is a {type(value).__name__}, and the model {text}; a head of scores takes "
                    "longspan.train.ScoredDocument(ids, …), a language model a Document or token ids"
                )
            if len(value) != length:
                raise PlanError(
                    f"document {document} has {plural(len(value), 'token')}, the plan laid out {length}; plan from the "
                    "lengths of the documents that the step is given"
                )
            if (parent := getattr(value, "parent", -1)) >= 0:
                self._parents[document] = parent
            counts.append(count_targets(value))
        if self.items is None:
            return tuple(counts)
        from longspan.data.item_documents import count_text_targets

        return count_text_targets(self.documents, self.items)

    def check_targets(self, plan: Plan) -> None:
        """Raise PlanError where the plan and the documents disagree; counts the documents' targets first.

        They disagree in the number of targets, in which document continues which, or in that a prefix which others
        continue predicts tokens.
        """
        targets = sum(self.targets_by_document)
        if self._parents or plan.parents is not None:
            planned = plan.parents or (-1,) * len(plan.lengths)
            for document, parent in enumerate(planned):
                if (given_parent := self._parents.get(document, -1)) != parent:
                    texts = [
                        f"continues document {p}" if p >= 0 else "continues none" for p in (given_parent, parent)
                    ]
                    raise PlanError(
                        f"document {document} {texts[0]} and in the plan it {texts[1]}; plan the lengths of what "
                        "share_prefixes returns with parents=shared.parents, and give the step the same documents"
                    )
            for parent in set(planned) - {-1}:
                if own_targets := self.targets_by_document[parent]:
                    raise PlanError(
                        f"document {parent} predicts {plural(own_targets, 'token')} and other documents continue it: "
                        "the loss of these would count once for all of them; share only rows without a target "
                        "(share_prefixes)"
                    )
        if plan.targets == targets:
            return
        clause = "" if self.items is None else f" that are not placeholders of {len(self.items)} items"
        raise PlanError(
            f"the plan divides the loss by {plan.targets} targets, its {len(plan.lengths)} documents predict "
            f"{plural(targets, 'token')}{clause}; plan with targets={targets}, or without targets= where every token "
            "is predicted"
        )


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What a step runs over, once `check_step_arguments` has found that the parts belong together.

    `model` is the caller's; of a MultimodalModel the passes run the `language_model` inside.
    """

    model: nn.Module
    language_model: nn.Module
    plan: Plan
    documents: StepDocuments
    world: World
    backward: bool


def check_step_arguments(
    model: nn.Module, plan: Plan, documents: Any, world: World, *, backward: bool
) -> StepInputs:
    """Check the arguments of a step, and return what it runs over.

    Raises ModelError, DataError or PlanError if the parts do not belong together. Before the first step in a mode all
    ranks try the model's rows together: they may not influence each other outside attention.
    """
    language_model: Any = model
    if is_multimodal(model):
        from longspan.model.multimodal.multimodal_model import check_world_of_model

        check_world_of_model(model, world)
        language_model = model.language_model
    if not isinstance(documents, StepDocuments):
        documents = StepDocuments(model, documents, plan.lengths)
    refuse_unprepared_model(language_model)
    rules = call_rules(language_model)
    refuse_randomness(language_model, training=backward)
    if world.home.pp > 1 and not is_pipeline(language_model):
        raise ModelError(
            f"the home has pp {world.home.pp}, but {type(language_model).__name__} is not cut into stages; call model "
            "= longspan.prepare(model, world), or use a home without pp"
        )
    if plan.slots != world.home.slots:
        raise PlanError(f"the plan is for {plan.slots} slots, the home has {world.home.slots}; plan for this home")
    if plan.mode == "free" and has_weights_on_host(language_model):
        raise PlanError(
            "the plan is in free mode, which keeps weights whole through a step, and they wait on the host "
            "(offload_weights); plan with mode='lockstep'"
        )
    for name in ("pp", "ep"):
        if plan.mode == "free" and (degree := getattr(world.home, name)) > 1:
            raise PlanError(
                f"the plan is in free mode, where slots are at different micro-batches, but the home has {name} "
                f"{degree}, under which all of them wait for each other in every layer; plan with mode='lockstep'"
            )
    if plan.row_multiple % (multiple := rules.row_multiple):
        raise PlanError(
            f"the plan has row_multiple {plan.row_multiple}, the model is sequence-parallel over tp {multiple}; plan "
            f"with row_multiple={multiple}"
        )
    documents.check_targets(plan)
    if plan.parents is not None:
        rules.check_shared_prefixes(plan.micro_batches, training=backward)
        if is_multimodal(model):
            raise ModelError(
                "documents of the plan share prefixes, and a MultimodalModel takes whole documents; plan them before "
                "share_prefixes"
            )
    if rules.position_table is not None:
        refuse_documents_beyond_positions(rules.position_table, plan.micro_batches)
    try_rows(language_model, world, backward=backward)
    return StepInputs(model, language_model, plan, documents, world, backward)


def check_update_arguments(optimizer: Optimizer | None, max_grad_norm: float | None, *, backward: bool) -> None:
    """Raise ModelError for an optimizer without backward, for one that cannot update its parameters, and for a
    `max_grad_norm` without an optimizer.

    It cannot update parameters that wait on the host, unless it is an OffloadedStates. Torch's fused and foreach
    kernels cannot update plain and sharded parameters of one group.
    """
    if optimizer is not None and not backward:
        raise ModelError(
            "an optimizer without backward has no gradients; leave out one of optimizer, backward=False"
        )
    waiting = 0
    for index, group in enumerate([] if optimizer is None else optimizer.param_groups):
        parameters = group["params"]
        waiting += sum(map(waits_on_host, parameters))
        sharded = sum(isinstance(parameter, DTensor) for parameter in parameters)
        if not 0 < sharded < len(parameters):
            continue
        # torch chooses its foreach kernels by itself where a parameter is on a GPU
        by_default = group.get("foreach") is None and any(parameter.is_cuda for parameter in parameters)
        if group.get("fused") or group.get("foreach") or by_default:
            raise ModelError(
                f"group {index} of the optimizer has {sharded} sharded parameters and {len(parameters) - sharded} "
                "plain ones, which torch's fused and foreach kernels do not take together; use "
                "longspan.train.build_optimizer, put them in groups of their own, or pass foreach=False"
            )
    if waiting and not isinstance(optimizer, OffloadedStates):
        raise ModelError(
            f"{waiting} parameters of the optimizer, {type(optimizer).__name__}, wait on the host (offload_weights), "
            "where it cannot update them; pass what longspan.train.offload_optimizer_states(optimizer, world) "
            "returns, which brings them to the device"
        )
    if max_grad_norm is not None and optimizer is None:
        raise ModelError(f"max_grad_norm {max_grad_norm} without an optimizer clips nothing; pass both, or neither")


def check_temperature(temperature: float, *, has_mtp: bool = False) -> None:
    """Raise LossError for what is no temperature, and for another than 1 beside multi-token prediction."""
    if temperature == 1:
        return
    if not 0 < temperature < math.inf:
        raise LossError(f"temperature is {temperature!r}; give a number above 0, such as that of the sampler")
    if has_mtp:
        raise LossError(
            f"temperature is {temperature:g}, and multi-token prediction predicts at temperature 1; leave mtp= out"
        )
