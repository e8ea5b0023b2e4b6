"""The model of a run, fit for its data, and prepared."""

import warnings
from functools import partial
from pathlib import Path

import torch

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, on_every_rank, on_first_rank
from longspan.config.sections import LoraSection, RunConfig
from longspan.corpus.run_corpus import check_tokenizer
from longspan.errors import ModelError, RunFolderError
from longspan.model.weights.empty import empty_model, images_class
from longspan.run.checks.encoder import check_images
from longspan.run.set_up.data import RunData
from longspan.run.set_up.kept_files import keep_model_files
from longspan.train.long_documents import configuration_for
from longspan.train.terms.mtp import add_configured_depths, depths_line
from longspan.train.training import (
    AnyModel,
    add_configured_adapter,
    load_run_model,
    model_configuration,
    prepare_run_model,
    unread_model,
)


def check_targets(config: RunConfig, world: World) -> None:
    """Raise ModelError on every rank where [lora] names targets or parts that the model has not; nothing is read.

    A model that is read with its towers where the corpus has images, and without them otherwise, is left to
    `prepared_for`.
    """
    if not config.lora.rank or (not config.lora.targets and config.lora.parts == LoraSection().parts):
        return

    def check() -> None:
        configuration = model_configuration(config, config.data.vocab_size)
        architecture = images_class(configuration, images=False)
        if architecture is not None or not hasattr(configuration, "vision_config"):
            model = empty_model(configuration, torch.float32, architecture)
            with warnings.catch_warnings(action="ignore"):  # of what is left out, which the run says later
                add_configured_adapter(config, add_configured_depths(config, model, read=False))

    on_first_rank(world, check, ModelError)


def prepared_for(data: RunData, config: RunConfig, world: World, log: LogLine, *, resumed: bool) -> AnyModel:
    """The run's model, fit for its data, and prepared.

    Of a run that is `resumed` no weight is read or drawn, for its checkpoint has them all, but under [lora]: then it
    has the adapter alone.
    """
    rows = data.tokenizer_size if config.data.tokenizer else config.data.vocab_size
    named = on_every_rank(world, lambda: model_configuration(config, rows), ModelError)
    check_tokenizer(config, named, data.tokenizer_size)
    fit = configuration_for(named, config.model, *data.longest, log)
    if config.mtp.depths and not resumed:
        log(on_every_rank(world, lambda: depths_line(config, fit), ModelError))
    images = data.images > 0
    check_images(config, data.images)
    load = unread_model if resumed and not config.lora.rank else partial(load_run_model, vocabulary=rows)
    load = partial(load, images=images)
    model = on_every_rank(world, lambda: load(config, configuration=fit), ModelError)
    keep = partial(keep_model_files, Path(config.run.dir), config.model, fit, type(model).__name__, log)
    on_first_rank(world, keep, RunFolderError)
    return prepare_run_model(config, world, model, images=images)
