"""The teacher of a run ([teacher]): its configuration, checked against model and documents, and its prepared model."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig, PreTrainedModel

from longspan.comm import World
from longspan.comm.all_ranks import run_on_every_rank, run_on_first_rank, silence_warnings_of_other_ranks
from longspan.config.dtypes import compute_dtype_name
from longspan.config.memory_keys import form_of_config
from longspan.config.sections import RunConfig, TeacherModel
from longspan.corpus.fit_to_model import check_ids_in_vocabulary
from longspan.corpus.tokenizer import TextTokenizer, check_vocabulary, load_tokenizer
from longspan.data.corpus_documents import Corpus
from longspan.errors import DataError, LongspanError, ModelError, plural
from longspan.model import prepare
from longspan.model.kinds import SCORE_HEADS
from longspan.model.load import load_model
from longspan.model.options import PrepareOptions
from longspan.model.prepared import read_call_rules
from longspan.model.weights.hf_folder import read_configuration
from longspan.plan.shape.sharing_rules import SharingRules
from longspan.train.run_model.prepare import (
    AnyModel,
    check_as_prepare_does,
    check_comm_types_fit_layers,
    frozen_form_and_saving,
)

if TYPE_CHECKING:
    from longspan.plan import MemoryPlan


def teacher_model(config: RunConfig, device: str) -> TeacherModel:
    """Return the keys of a run's teacher, with the arithmetic of the run's model in place of a dtype "auto"."""
    return config.teacher.as_model(compute_dtype_name(config.model, device))


def read_teacher_configuration(config: RunConfig) -> PreTrainedConfig:
    """Read the architecture that teacher.path names. Raises ModelError for one that predicts no tokens."""
    configuration = read_configuration(Path(config.teacher.path))
    name = next((name for name in configuration.architectures or () if name.endswith(SCORE_HEADS)), None)
    if name is not None:
        raise ModelError(
            f"teacher.path {config.teacher.path} holds a {name}, which makes scores, and no distribution of tokens; "
            "give a causal language model"
        )
    return configuration


def check_teacher_reads_documents(
    config: RunConfig, world: World, corpora: Sequence[Corpus], configuration: PreTrainedConfig
) -> None:
    """Raise DataError, on every rank, where a run's documents have ids that the teacher has not, or other ones."""
    path = config.teacher.path
    for corpus in corpora:
        check_ids_in_vocabulary(corpus, configuration, path)
    run_on_first_rank(
        world, lambda: check_teacher_tokenizer(load_tokenizer(config.run.dir), path, configuration), DataError
    )


def check_teacher_tokenizer(tokenizer: TextTokenizer, path: str, configuration: PreTrainedConfig) -> None:
    """Raise DataError where a run's tokenizer and that of the teacher in this folder give other tokens to an id, or the
    teacher has no logit for one.

    Added tokens may have other names, and chat templates are not compared.
    """
    check_vocabulary(
        tokenizer.own_size, configuration.get_text_config().vocab_size, tokenizer="of the model", model=path
    )
    try:
        teacher = load_tokenizer(path)
    except DataError as error:
        raise DataError(
            f"teacher.path: {error}; the teacher's tokenizer is compared with the model's: both need one"
        ) from error
    differing = [*_differing_tokens(tokenizer, teacher)]
    if differing:
        number, token, other = differing[0]
        raise DataError(
            f"teacher.path {path} has another tokenizer: {plural(len(differing), 'id')} are of other tokens, the first "
            f"of them {number}, {token!r} of the model and {other!r} of the teacher; give a teacher with the model's "
            "tokenizer"
        )


def _differing_tokens(ours: TextTokenizer, theirs: TextTokenizer) -> Iterator[tuple[int, str, str | None]]:
    """(id, token, the other tokenizer's token, None without any) of each id that differs, rising. A token is written in
    the bytes that it stands for, or as sentencepiece writes it."""
    added, added_by_other = (t.engine.get_added_tokens_decoder() for t in (ours, theirs))
    tokens, tokens_of_other = (
        {number: token for token, number in t.engine.get_vocab(with_added_tokens=True).items()}
        for t in (ours, theirs)
    )
    for number in sorted(tokens):
        other = tokens_of_other.get(number)
        if other != tokens[number] and not (number in added and number in added_by_other):
            yield number, tokens[number], other


def load_teacher(keys: TeacherModel, configuration: PreTrainedConfig) -> PreTrainedModel:
    """Load a teacher without weights, which `prepare` reads; nothing of it is trained."""
    model = load_model(keys.path, config=configuration, dtype=keys.dtype, sharded=True, quantized=True)
    return model.requires_grad_(False)


def check_teacher(config: RunConfig, world: World, configuration: PreTrainedConfig) -> None:
    """Refuse a teacher that its folder, the home or the model's keys forbid, before data are read."""
    keys = teacher_model(config, world.device.type)
    with _named_in_errors(keys):
        with warnings.catch_warnings(action="ignore"):  # they come once more when the run loads it
            model = load_teacher(keys, configuration)
        check_comm_types_fit_layers(config, model)
        check_as_prepare_does(model, world, _options(config, keys, model, None))


def read_teacher_rules(config: RunConfig, world: World, configuration: PreTrainedConfig) -> SharingRules:
    """Return what a run's teacher forbids of shared prefixes."""
    keys = teacher_model(config, world.device.type)
    with warnings.catch_warnings(action="ignore"):
        model = load_teacher(keys, configuration)
    rules = read_call_rules(model, world, _options(config, keys, model, None))
    return SharingRules(rules.separate_features(training=False), rules.length_limits)


def prepare_teacher(
    config: RunConfig, world: World, configuration: PreTrainedConfig, memory: "MemoryPlan | None" = None
) -> AnyModel:
    """Load and prepare the teacher of a run, with a configuration whose positions are scaled; entered by all ranks.

    No checkpoint has it. Raises ModelError, on every rank, for a folder that cannot be its.
    """
    keys = teacher_model(config, world.device.type)
    with _named_in_errors(keys):
        with silence_warnings_of_other_ranks(world):
            model = run_on_every_rank(world, partial(load_teacher, keys, configuration), ModelError)
        prepared: Any = prepare(model, world, options=_options(config, keys, model, memory))
    return prepared.eval()


def _options(
    config: RunConfig, keys: TeacherModel, model: PreTrainedModel, memory: "MemoryPlan | None"
) -> PrepareOptions:
    frozen, _ = frozen_form_and_saving(keys, model)
    form = memory or form_of_config(config)
    return PrepareOptions(
        frozen=frozen,
        offload_weights=config.teacher.offload_weights,
        mlp_tile_tokens=form.mlp_tile_tokens,
        compiled=config.train.compile,
        attention_kernel=config.context.attention_kernel or None,
    )


@contextmanager
def _named_in_errors(keys: TeacherModel) -> Iterator[None]:
    try:
        yield
    except LongspanError as error:
        named = type(error)(f"the teacher {keys.path}: {error}")
        named.on_all_ranks = error.on_all_ranks
        raise named from error
