"""What a run reads: its corpus, the order of its documents, and the sets that it evaluates."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedConfig

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, on_every_rank
from longspan.config.sections import RunConfig
from longspan.corpus.run_corpus import shared_corpus
from longspan.data.documents import Corpus
from longspan.data.pack_order import PackOrder
from longspan.data.step_order import StepOrder
from longspan.errors import DataError
from longspan.evaluation.sets import EvaluationSet
from longspan.run.check_plans import check_longest
from longspan.run.evaluations.open_sets import check_lengths, check_sources, open_sets, with_rows
from longspan.run.set_up.resume import order_version
from longspan.train.plans import query_heads
from longspan.train.plans.order import documents_line, step_order_of


@dataclass(frozen=True)
class RunData:
    """The documents of a run as every rank has them, and the model's configuration, by which they are read."""

    model: PreTrainedConfig
    corpus: Corpus
    order: StepOrder | PackOrder
    sets: tuple[EvaluationSet, ...]
    longest: tuple[int, str]  # tokens of the longest document that a planner is given, and where it comes from

    @property
    def tokenizer_size(self) -> int:
        """How many ids the tokenizer has."""
        return self.corpus.manifest.tokenizer_size

    @property
    def images(self) -> int:
        """The images of all documents, those of evaluation sets too."""
        return len(self.corpus.images or ()) + sum(len(getattr(s.documents, "items", ())) for s in self.sets)

    def image_rows(self, tokens_per_step: int) -> float:
        """The rows of images in a step, on all slots together, in the mean."""
        if self.corpus.images is None or not len(self.corpus.images):
            return 0.0
        share = float(self.corpus.images.column("rows").sum()) / float(self.corpus.lengths.sum())
        return share * tokens_per_step

    def check_fit(self, config: RunConfig, world: World) -> None:
        """Raise ConfigError where the longest document of the corpus or of a set does not fit."""
        (tokens, origin), heads = self.longest, query_heads(self.model)
        check_longest(config, world.home, tokens, origin, heads)
        check_lengths(with_rows(self.sets, config), config, world.home, self.model, tokens, heads)


def open_data(
    config: RunConfig, model: PreTrainedConfig, checkpoint: Path | None, world: World, log: LogLine
) -> RunData:
    """The documents of the run that goes on from this checkpoint, or begins. Raises ConfigError or DataError."""
    check_sources(config, world, model.get_text_config().vocab_size)
    corpus = shared_corpus(config, world, model, resumed=checkpoint is not None, log=log)
    order = step_order_of(config, corpus, version=order_version(checkpoint, world))
    log(documents_line(config, order))
    sets, run_dir = open_sets(config, corpus, corpus.select(order.evaluation), world, log), Path(config.run.dir)
    sets = on_every_rank(world, lambda: tuple(evaluated.with_images(model, run_dir) for evaluated in sets), DataError)
    return RunData(model, corpus, order, sets, _longest(config, corpus, order))


def _longest(config: RunConfig, corpus: Corpus, order: StepOrder | PackOrder) -> tuple[int, str]:
    """The tokens of the longest document that a planner is given, and where it comes from."""
    lengths, data = corpus.lengths, config.data
    if not data.pack_to:
        longest = int(np.argmax(lengths))
        return int(lengths[longest]), corpus.origin(longest)
    packed = data.pack_to if data.pack_attention == "across" else min(data.pack_to, int(lengths.max()))
    held_out = max(order.evaluation, key=lambda document: int(lengths[document]), default=None)
    if held_out is None or lengths[held_out] <= packed:
        return packed, "packs"
    return int(lengths[held_out]), corpus.origin(held_out)
