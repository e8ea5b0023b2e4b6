"""Whether [context] and the evaluation sets make plans that fit the home and hold the longest document."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from longspan.config.file import nearest_hint
from longspan.config.keys import AUTO
from longspan.config.plan_section import EvalConfig
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, plural
from longspan.layout import Layout
from longspan.model import PRESETS
from longspan.plan.check import COMM_TYPES
from longspan.train.plans import PlanChoice
from longspan.train.plans.own import check_cost, check_planner

# As in longspan.attention.KERNELS and longspan.ssm.kernels.packages, which bring torch: keys are checked without it.
ATTENTION_KERNELS = ("fa4", "cudnn", "torch_flash", "triton_flash", "cpu_flash", "reference")
MIXER_KERNELS = ("torch", "mamba_ssm", "causal_conv1d")


def check_plans(config: RunConfig, home: Layout, *, training: bool) -> None:
    """Raise ConfigError where training or an evaluation cannot be planned on this home, whatever the documents.

    Plans are tried with the longest document that the keys allow, or with one token where they allow any length.
    """
    for key, kernel in _kernel_keys(config):
        _check_kernel_name(key, kernel)
    _check_mixer_kernels(config.context.mixer_kernels)
    if config.context.cost_model:
        check_cost(config.context.cost_model, config.run.machine)
    for choice, limit in _plan_choices(config, training=training):
        check_planner(choice.planner, choice.planner_key)
        for kind in choice.comm_types:
            if kind not in COMM_TYPES:
                raise ConfigError(f"{choice.comm_type_key} is {kind!r}; {nearest_hint(kind, COMM_TYPES)}")
        if not choice.degree and choice.planner != "fixed":
            raise ConfigError(
                f'{choice.degree_key} is "{AUTO}", which chooses one degree for plans of packed documents, and '
                f'{choice.prefix}planner is "{choice.planner}"; use {choice.prefix}planner = "fixed", or leave '
                f"{choice.degree_key} out"
            )
        if choice.has_one_degree:
            _check_degree_divides(choice, home)
        choice.check_longest_document(limit.value or 1, home, f"{limit.key} {limit.value or 1}")


def check_longest(config: RunConfig, home: Layout, longest: int, origin: str, heads: int | None = None) -> None:
    """Raise ConfigError where the longest document of the corpus fits no group of slots.

    `longest` are its tokens, and `origin` names its file. `heads` are the query heads of a model from a folder, which
    its communication type may not deal out to a group.
    """
    for choice, limit in _plan_choices(replace(config, eval=()), training=True, heads=heads):
        # a document longer than a pack is held out: training plans only packs, evaluation the document
        is_pack = limit.key == "data.pack_to" and longest > limit.value
        tokens, planned_origin = (limit.value, "packs") if is_pack else (longest, origin)
        _check_fits(choice, limit.key, home, tokens, f"the longest document ({tokens} tokens, of {planned_origin})")


def check_longest_of_set(
    config: RunConfig, entry: EvalConfig, home: Layout, longest: int, origin: str, heads: int | None = None
) -> None:
    """Raise ConfigError if the longest document of a named evaluation set fits no group of slots.

    `longest` are its tokens, `origin` names its file, and `heads` are the model's query heads (`check_longest`).
    """
    choice, title = PlanChoice.evaluation(config, entry, heads=heads), f"the longest document of set {entry.name!r}"
    _check_fits(choice, f"{entry.prefix}max_document_tokens", home, longest, f"{title} ({longest} tokens, of {origin})")


class _Limit(NamedTuple):
    """The key that cuts longer documents, and its value (0: none is cut)."""

    key: str
    value: int


def _plan_choices(
    config: RunConfig, *, training: bool, heads: int | None = None
) -> Iterator[tuple[PlanChoice, _Limit]]:
    """Yield how training and each evaluation are planned, with the key that cuts their documents.

    `heads` are the model's query heads; None before a folder is read, while those of a preset are known.
    """
    if heads is None and config.model.preset_name:
        heads = PRESETS[config.model.preset_name].values["num_attention_heads"]
    limit = _Limit("data.max_document_tokens", config.data.max_document_tokens)
    if training:
        pack = _Limit("data.pack_to", config.data.pack_to)
        yield PlanChoice.training(config, heads=heads), pack if pack.value else limit
    if config.data.eval_documents != 0 or not training:  # without training, evaluations are all there is
        yield PlanChoice.evaluation(config, heads=heads), limit
    for entry in config.eval:
        choice = PlanChoice.evaluation(config, entry, heads=heads)
        yield choice, _Limit(f"{entry.prefix}max_document_tokens", entry.max_document_tokens)


def _kernel_keys(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield every key of an attention kernel, and its value."""
    context = config.context
    yield "context.attention_kernel", context.attention_kernel
    for entry in config.evaluations:
        yield f"{entry.prefix}attention_kernel", entry.attention_kernel


def _check_kernel_name(key: str, name: str) -> None:
    """Raise ConfigError for an unknown attention kernel; "" leaves the choice to longspan."""
    if name and name not in ATTENTION_KERNELS:
        raise ConfigError(f"{key} is {name!r}; {nearest_hint(name, ATTENTION_KERNELS)}")


def _check_mixer_kernels(names: tuple[str, ...]) -> None:
    """Raise ConfigError for kernels of state-space layers that are unknown or exclude each other."""
    for name in names:
        if name not in MIXER_KERNELS:
            raise ConfigError(
                f"context.mixer_kernels: {name!r} is no kernel of state-space layers; use {', '.join(MIXER_KERNELS)}"
            )
    if "torch" in names and len(set(names)) > 1:
        raise ConfigError(f"context.mixer_kernels are {', '.join(names)}; give only torch, or the others")


def _check_degree_divides(choice: PlanChoice, home: Layout) -> None:
    """Raise ConfigError, with degrees that fit, for a degree that does not divide the slots; 0 is chosen later."""
    if not choice.degree or home.slots % choice.degree == 0:
        return
    fitting = [d for d in range(1, home.slots + 1) if home.slots % d == 0]
    ranks = choice.degree * home.tp * home.pp
    raise ConfigError(
        f"{choice.degree_key} {choice.degree} does not divide {plural(home.slots, 'slot')} "
        f"({plural(len(home.ranks), 'rank')} / tp {home.tp} / pp {home.pp}); "
        f"use {' or '.join(map(str, fitting))}, or start a multiple of {ranks} processes (--world {ranks}, or torchrun)"
    )


def _check_fits(choice: PlanChoice, cut_by: str, home: Layout, longest: int, title: str) -> None:
    """Raise ConfigError where the longest document does not fit; under a limit of rows it gives advice.

    `cut_by` is the key that cuts longer documents, and `title` names the document in the error.
    """
    try:
        choice.check_longest_document(longest, home, title)
    except ConfigError as error:
        if not choice.options.max_tokens_per_slot:
            raise
        raise ConfigError(f"{error}. {_room_advice(longest, choice, home)}; {cut_by} cuts longer texts") from error


def _room_advice(longest: int, choice: PlanChoice, home: Layout) -> str:
    """Write how many rows of a slot the longest document needs if all slots share it, and the key that allows that.

    A key is named only where it keeps the document on fewer slots.
    """
    key_text = ""
    if choice.has_one_degree and 0 < choice.degree < home.slots:
        key_text = f' ({choice.degree_key} = {home.slots} or {choice.prefix}planner = "dynamic")'
    elif choice.planner == "dynamic" and 0 < choice.max_degree < home.slots:
        key_text = f" ({choice.prefix}max_dynamic_context_parallel_size = 0)"
    return f"It needs {-(-longest // home.slots):,} rows of each of all {plural(home.slots, 'slot')}{key_text}"
