"""The loss that saved weights are evaluated by: that of the first subject's run, over any documents.

A loss of preferences with a reference needs that model's log-probabilities: where no file has them, they are made from
the weights that the run began with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig

from longspan.checkpoint.base import check_base_unchanged
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank, run_on_first_rank
from longspan.comm.received_signals import StopSignal
from longspan.comm.world_machine import set_world_machine
from longspan.config.file import load_config
from longspan.config.loss_arguments import loss_text
from longspan.config.sections import RunConfig
from longspan.data.corpus_documents import CorpusDocuments
from longspan.errors import ConfigError, ModelError
from longspan.evaluation.load_saved import CheckedWeights, load_saved_model
from longspan.evaluation.reference import compute_references, read_reference_log_probs, reference_digest
from longspan.evaluation.request import Subject
from longspan.model.weights.hf_folder import planned_configuration
from longspan.plan import Cost
from longspan.resolve.planner_config import PlannerConfig, query_heads
from longspan.resolve.run_cost import KEY, find_run_cost, read_run_machine
from longspan.train.run_model.prepare import AnyModel
from longspan.train.training import loss_of_documents

if TYPE_CHECKING:
    from longspan.train.terms.document_loss import DocumentLoss

# Sets have names; "" names the documents that a run holds out.
Sets = Mapping[str, CorpusDocuments]


@dataclass(frozen=True)
class SavedLosses:
    """The loss of each set, by name (None: the cross entropy, or that of a model that scores), and what it is, in
    words; "" for the model's own. With `answers_alone` every second document is left out.
    """

    losses: "Mapping[str, DocumentLoss | None]"
    text: str = ""
    answers_alone: bool = False

    def select(self, documents: CorpusDocuments) -> CorpusDocuments:
        """Return the documents of a set that the loss is of."""
        return documents.corpus.select(documents.ids[::2]) if self.answers_alone else documents


def find_losses(
    checked: CheckedWeights,
    config: RunConfig,
    configuration: PreTrainedConfig,
    sets: Sets,
    world: World,
    log: LogLine,
) -> SavedLosses:
    """Return the losses of sets by the keys of [train] of a run, or of a folder; entered by all ranks.

    Log-probabilities of the reference that no file has are computed. Where the reference cannot be had, the loss is the
    cross entropy of chosen answers, or of KTO's answers, which a line says.
    """
    train = config.train
    if train.needs_reference:
        missing = partial(_why_without_reference, checked.subject, world.device.type)
        if reason := run_on_first_rank(world, missing, ModelError):
            text = f"cross entropy of {'answers' if train.row_form == 'kto' else 'chosen answers'}"
            log(
                f"the reference of the loss {train.loss} cannot be computed: {reason}. The loss is the {text} alone"
            )
            return SavedLosses(dict.fromkeys(sets), text, answers_alone=True)
        _read_or_compute_references(checked, config, configuration, sets, world, log)
    losses = {name: loss_of_documents(documents, train) for name, documents in sets.items()}
    return SavedLosses(losses, loss_text(train) if train.loss else "")


def _read_or_compute_references(
    checked: CheckedWeights,
    config: RunConfig,
    configuration: PreTrainedConfig,
    sets: Sets,
    world: World,
    log: LogLine,
) -> None:
    digest = reference_digest(config, configuration, world)
    if read_reference_log_probs([*sets.values()], digest, world, log):
        return
    began_with = replace(checked.subject, weights=replace(checked.subject.weights, base=True))
    images = any(getattr(documents, "items", ()) for documents in sets.values())
    checked = replace(checked, subject=began_with)
    reference, _ = load_saved_model(checked, config, configuration, world, images=images)
    cost = price_plans(config, reference.eval(), world, log=lambda _: None)  # the trained model's price is logged
    choice = PlannerConfig.evaluation(config, cost=cost, heads=query_heads(configuration))
    with StopSignal() as stop:
        compute_references(reference, [*sets.values()], digest, config, choice, world, log, stop.stop_reason)


def _why_without_reference(subject: Subject, device: str) -> str:
    """The text is "" where the model can be had."""
    trained = load_config(subject.folder / "config.toml")  # a flag may scale positions otherwise
    try:
        check_base_unchanged(subject.folder, trained, device, goes_on=True)
    except ModelError as error:
        return str(error)
    return ""


def price_plans(config: RunConfig, model: AnyModel, world: World, log: LogLine) -> Cost:
    """Return the cost by which plans of a prepared model are priced; entered by all ranks."""
    set_world_machine(world, partial(read_run_machine, config), KEY)
    gpu = world.device.type == "cuda"
    planned = planned_configuration(model.config, config.model.path)
    price = partial(find_run_cost, config, planned, log, gpu=gpu, slots=world.home.slots)
    return run_on_every_rank(world, price, ConfigError)
