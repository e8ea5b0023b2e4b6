"""Small copies of models: a configuration of the same class and kinds of layers at widths of tens, and weights for it.

What a copy cannot show: anything that needs the true sizes, such as the kernels of a GPU at a true head size
(`true_heads` keeps those), or the numbers of trained weights.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
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
    OVERRIDES,
    SCALED_FROM,
    Sizes,
    alternative_sizes,
    choose_layers,
    least_layers,
    small_image_values,
    small_periods,
    small_values,
)
from longspan.model.seams.mixers import use_torch_operations

_T = TypeVar("_T")
MOST_PARAMETERS = 4_000_000  # of a copy with small heads
_LEFT_OUT = ("quantization_config", "auto_map", "torch_dtype", "dtype", "id2label", "label2id", "_name_or_path")
_LEFT_OUT += ("transformers_version", "architectures", "attn_implementation", "_attn_implementation")


def shrink_configuration(
    config: PreTrainedConfig, *, true_heads: bool = False, experts: int = 4, images: bool = False
) -> PreTrainedConfig:
    """Shrink a configuration to one of the same class and of every kind of layer, at widths of tens.

    It has two to six layers, one of each kind at least, and keeps rope types, windows, sinks, soft caps, experts and
    switches. Windows and chunks are shorter than the documents on which a copy is tried, and scalings of positions
    begin within these. Dropout is left out. `true_heads`: heads of queries, keys and values are as large as those of
    `config`, in every layer. `images`: for the class from images and text to text, if `config` belongs to another class
    too.

    >>> shrink_configuration(Qwen3Config()).hidden_size
    48

    Raises ModelError, with the errors of its construction, if no small copy of the class can be made.
    """
    base: Any = MODEL_MAPPING.get(type(config), None)  # pyright: ignore[reportArgumentType]
    errors: list[str] = []
    for sizes in alternative_sizes(Sizes(true_heads=true_heads, experts=experts)):
        try:
            values = _small_attributes(config, sizes, least_layers(config))
            small = type(config).from_dict(small_image_values(values, sizes, base))
            _check_small_model(small, sizes, images=images)
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
    config: PreTrainedConfig, dtype: torch.dtype, *, seed: int = 0, attention: str = "sdpa", images: bool = False
) -> PreTrainedModel:
    """Make a model of a small configuration, on the CPU, with random weights that depend only on the seed.

    `attention` is transformers' name of an implementation; with `images` the model is of the class that reads images.
    Norms, biases and sinks start at constants, which would hide their gradients: every parameter is moved at random, as
    are the biases of routers, which are buffers. State-space layers run in torch's operations.
    """
    with torch.random.fork_rng(devices=[]), _silence_warnings():
        torch.manual_seed(seed)
        model = _make_model(config, attention, images=images)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and name.endswith("bias"):
                buffer += 0.1 * torch.randn_like(buffer)
    model.config.dtype = dtype
    use_torch_operations(model)
    return cast(PreTrainedModel, cast(Any, model).to(dtype))


def _make_model(config: PreTrainedConfig, attention: str, *, images: bool) -> PreTrainedModel:
    settings = {"dtype": torch.float32, "experts_implementation": "eager"}
    automatic: Any = AutoModelForImageTextToText if images or reads_images_alone(config) else AutoModelForCausalLM
    if automatic is AutoModelForCausalLM and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        automatic = AutoModel  # of a text model inside a wrapper

    def make(attention: str) -> PreTrainedModel:
        return automatic.from_config(
            deepcopy(config), attn_implementation=attention, trust_remote_code=False, **settings
        )

    try:
        return make(attention)
    except ValueError as error:
        if "does not support" not in str(error):
            raise
        return make("eager")


def reads_images_alone(config: PreTrainedConfig) -> bool:
    """Return whether transformers has a class from images and text to text for a configuration, and no causal one."""
    kind = type(config)
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING


def _small_attributes(config: PreTrainedConfig, sizes: Sizes, least: int) -> dict[str, Any]:
    # with the configurations inside; values in OVERRIDES may be functions of the others
    values = {name: value for name, value in config.to_dict().items() if name not in _LEFT_OUT}
    inner = {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}
    layers = choose_layers(values, least)
    layer_values = {name: layers.layer_value(name, value) for name, value in values.items() if name not in inner}
    small = small_values(layer_values, sizes) | small_periods(values)
    small |= {name: _small_attributes(value, sizes, least) for name, value in inner.items()}
    override: Mapping[str, Any] = OVERRIDES.get(config.model_type, {})
    return small | {name: value(small) if callable(value) else value for name, value in override.items()}


def _check_small_model(config: PreTrainedConfig, sizes: Sizes, *, images: bool) -> None:
    with torch.device("meta"), _silence_warnings():
        model = _make_model(config, "sdpa", images=images)
    count, limit = sum(p.numel() for p in model.parameters()), MOST_PARAMETERS
    limit *= 256 if sizes.true_heads else 1  # heads of 256 instead of 16, squared
    if count > limit:
        name, largest = max(model.named_parameters(), key=lambda item: item[1].numel())
        raise ModelError(
            f"it has {count:,} parameters, more than {limit:,}; the largest, {name}, is {tuple(largest.shape)}"
        )
    ids = torch.arange(1, 2 * SCALED_FROM)[None] % sizes.vocabulary  # longer than where scaled positions begin
    with torch.no_grad(), _silence_warnings():
        make_tiny_model(config, torch.float32, images=images)(input_ids=ids, use_cache=False)


@contextmanager
def _silence_warnings() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def try_once(key: Hashable, trial: Callable[[], _T]) -> _T:
    """Try a small copy on the host once for each key in a process; returns the result of the trial.

    The trial leaves the state of random numbers as it was, and runs in one thread: operations on tens of numbers take
    longer in several, above all if processes share the cores.
    """
    if key not in _results:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.random.fork_rng(devices=[]):
                _results[key] = trial()
        finally:
            torch.set_num_threads(threads)
    return _results[key]


_results: dict[Hashable, Any] = {}


def trial_error(error: Exception) -> str:
    """Write the error of a configuration, a constructor or a forward pass, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def parameter_gradients(loss: Tensor, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor | None]:
    """Compute the gradient of a loss for every parameter that requires one; None if the loss does not depend on it."""
    trained = {name: parameter for name, parameter in parameters if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return dict(zip(trained, gradients, strict=True))


def relative_error(result: Tensor, exact: Tensor, least: float = 1e-30) -> float:
    """Return the largest difference over the largest value, which is at least `least`; infinite instead of NaN."""
    error = float((result - exact).abs().max() / exact.abs().max().clamp(min=least))
    return float("inf") if error != error else error
