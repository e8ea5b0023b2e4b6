"""Small copies of models: a configuration of the same class and kinds of layers at widths of tens, and weights for it.

`small_values.py` has the widths. Not shown: what needs true sizes (`true_heads` keeps those of heads), or trained
weights.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily  # pyright: ignore[reportPrivateUsage]
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from longspan.errors import ModelError, plural
from longspan.model.exactness.small_values import (
    SCALED_FROM,
    SMALL_VOCABULARY,
    Sizes,
    choose_layers,
    small_image_values,
    small_periods,
    small_values,
)
from longspan.model.kinds import find_mixers
from longspan.plan.shape.families import find_family

# The limit is that of a copy with small heads.
MOST_PARAMETERS = 4_000_000
_LEFT_OUT = (
    "quantization_config",
    "auto_map",
    "torch_dtype",
    "dtype",
    "id2label",
    "label2id",
    "_name_or_path",
    "transformers_version",
    "architectures",
    "attn_implementation",
    "_attn_implementation",
)


def shrink_configuration(
    config: PreTrainedConfig, *, true_heads: bool = False, experts: int = 4, images: bool = False
) -> PreTrainedConfig:
    """Shrink a configuration to one of the same class and of every kind of layer, at widths of tens.

    >>> shrink_configuration(Qwen3Config()).hidden_size
    48

    It has two to six layers and keeps rope types, windows, sinks, soft caps, experts and switches; windows, chunks and
    scalings of positions begin within the documents of trials, and dropout is left out. `true_heads`: heads are as
    large as those of `config`; `images`: for the class from images and text to text. Raises ModelError, with the errors
    of its construction, if no small copy of the class can be made.
    """
    base: Any = MODEL_MAPPING.get(type(config), None)  # pyright: ignore[reportArgumentType]
    errors: list[str] = []
    # DeepStack adds rows of images after each of the first two layers, and two pipeline stages need two layers each.
    deep = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None)
    usual = Sizes(true_heads=true_heads, experts=experts)
    equal = replace(usual, grouped=False)
    wide = replace(usual, narrow=False)  # a hidden size as wide as the heads together
    both = replace(equal, narrow=False)
    # Sizes are tried until the class accepts them: some ask for other heads, widths or a padding id.
    for sizes in (usual, wide, equal, both, replace(usual, pad=0), replace(usual, pad=1), replace(both, pad=0)):
        try:
            values = _small_configuration_values(config, sizes, 4 if deep else 2)
            small = type(config).from_dict(small_image_values(values, base))
            with torch.device("meta"), _silence_warnings():
                model = _make_model(small, "sdpa", images=images)
            count = sum(p.numel() for p in model.parameters())
            limit = MOST_PARAMETERS * (256 if sizes.true_heads else 1)  # heads of 256 instead of 16, squared
            if count > limit:
                name, largest = max(model.named_parameters(), key=lambda item: item[1].numel())
                raise ModelError(
                    f"it has {count:,} parameters, more than {limit:,}; the largest, {name}, is {tuple(largest.shape)}"
                )
            ids = torch.arange(1, 2 * SCALED_FROM)[None] % SMALL_VOCABULARY  # so many that scaled positions are run
            with torch.no_grad(), _silence_warnings():
                make_tiny_model(small, torch.float32, images=images)(input_ids=ids, use_cache=False)
            return small
        except Exception as error:  # configurations and models raise errors of every kind
            errors.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    raise ModelError(
        f"no small copy of {type(config).__name__} can be made: {errors[0]}; "
        f"of {plural(len(errors), 'attempt')} none was built, the last said {errors[-1]}; "
        "add what the class needs to longspan/model/exactness/small_values.py, or give a small configuration of your "
        "own"
    )


def make_tiny_model(
    config: PreTrainedConfig, dtype: torch.dtype, *, attention: str = "sdpa", images: bool = False
) -> PreTrainedModel:
    """Make a model of a small configuration, on the CPU, with random weights that are always the same.

    Norms, biases and sinks start at constants, which would hide their gradients: every parameter is moved at random.
    """
    # Under a mode that widens types, parameters of float32 would be drawn otherwise.
    outside_mode = _pop_mode_temporarily() if _get_current_function_mode_stack() else nullcontext()
    with torch.random.fork_rng(devices=[]), _silence_warnings(), outside_mode:
        torch.manual_seed(0)
        model = _make_model(config, attention, images=images)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and name.endswith("bias"):
                buffer += 0.1 * torch.randn_like(buffer)
    model.config.dtype = dtype
    if find_mixers(model):
        from longspan.model.seams.mixers import use_torch_operations

        use_torch_operations(model)
    return cast(PreTrainedModel, cast(Any, model).to(dtype))


def _make_model(config: PreTrainedConfig, attention: str, *, images: bool) -> PreTrainedModel:
    settings = {"dtype": torch.float32, "experts_implementation": "eager"}
    automatic: Any = (
        AutoModelForImageTextToText if images or has_only_image_text_class(config) else AutoModelForCausalLM
    )
    if automatic is AutoModelForCausalLM and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        # A text model inside a wrapper has no class of its own for causal language models.
        automatic = AutoModel

    def make(attention: str) -> PreTrainedModel:
        return automatic.from_config(
            deepcopy(config), attn_implementation=attention, trust_remote_code=False, **settings
        )

    random_state = torch.get_rng_state()
    try:
        return make(attention)
    except ValueError as error:
        if "does not support" not in str(error):
            raise
        # A wrapper may have drawn weights before the part that lacks this attention (Gemma 4's tower of audio).
        torch.set_rng_state(random_state)
        return make("eager")


def has_only_image_text_class(config: PreTrainedConfig) -> bool:
    """Return whether transformers has a class from images and text to text for a configuration, and no causal one."""
    kind = type(config)
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING


def _small_configuration_values(config: PreTrainedConfig, sizes: Sizes, least: int) -> dict[str, Any]:
    """A family's row of `FAMILIES` comes last: its values may be functions of the others."""
    values = {name: value for name, value in config.to_dict().items() if name not in _LEFT_OUT}
    inner = {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}
    layers = choose_layers(values, least)
    layer_values = {name: layers.layer_value(name, value) for name, value in values.items() if name not in inner}
    small = small_values(layer_values, sizes) | small_periods(values)
    small |= {name: _small_configuration_values(value, sizes, least) for name, value in inner.items()}
    override = find_family(config.model_type).small
    return small | {name: value(small) if callable(value) else value for name, value in override.items()}


@contextmanager
def _silence_warnings() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
