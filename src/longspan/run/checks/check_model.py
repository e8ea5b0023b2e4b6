"""Whether [model], [lora], [mtp] and [encoder] fit each other and the ranks, before any process group exists.

What needs the model itself (names of adapted linears, the weights of a folder) is checked once it is loaded.
"""

from importlib.util import find_spec
from pathlib import Path

from longspan.config.defaults import encoder_default
from longspan.config.file import nearest_hint
from longspan.config.keys import AUTO, NOT_GIVEN
from longspan.config.sections import PARTS, PROJECTOR, RANDOM, TOWER, EncoderSection, LoraSection, MtpSection, RunConfig
from longspan.errors import ConfigError, plural
from longspan.layout import Layout
from longspan.model import PRESETS
from longspan.plan.shape.model_shape import read_experts

_EXPERT_PRESETS = "qwen3-moe-tiny or gpt-oss-tiny (8 experts)"
# By dtype of the parameters: in which dtypes a model may compute.
_COMPUTE = {"float32": ("float32", "bfloat16"), "bfloat16": ("bfloat16",), "float64": ("float64",)}
_BITS = {"float64": 53, "float32": 24, "bfloat16": 8}  # of a number's significand
TOWER_PARTS = frozenset((PROJECTOR, TOWER))


def check_model_keys(config: RunConfig, *, training: bool) -> None:
    """Raise ConfigError for keys that name no model or several, for no `lr` in training, or for wrong rope keys."""
    model = config.model
    keys = [key for key in ("path", "config", "preset") if getattr(model, key)]
    if len(keys) > 1:
        raise ConfigError(
            f"{' and '.join(f'model.{key} = {getattr(model, key)!r}' for key in keys)} name more than one model; keep "
            "path to train a folder's weights, config for random weights of a configuration, or preset"
        )
    if model.preset_name and model.preset_name not in PRESETS:
        raise ConfigError(f"model.preset is {model.preset!r}; {nearest_hint(model.preset, PRESETS)}")
    if training and config.train.lr == NOT_GIVEN:
        raise ConfigError(
            f"train.lr is not given, and {model.source or model.preset} has no default; give --train.lr: "
            "often 1e-6 to 2e-5 to train weights on, 1e-4 to 1e-3 from random ones"
        )
    if model.rope_scaling == "dynamic":
        raise ConfigError(
            'model.rope_scaling is "dynamic", which chooses frequencies by the longest position of a batch at run '
            'time: a document\'s loss would depend on its neighbours; use "yarn" or "linear"'
        )
    if model.rope_scaling and model.rope_scaling not in (kinds := ("yarn", "linear")):
        raise ConfigError(f"model.rope_scaling is {model.rope_scaling!r}; {nearest_hint(model.rope_scaling, kinds)}")
    if model.rope_factor and not model.rope_scaling:
        raise ConfigError(f'model.rope_factor is {model.rope_factor:g} and model.rope_scaling is empty; use "yarn"')
    if 0 < model.rope_factor <= 1:
        raise ConfigError(f"model.rope_factor is {model.rope_factor:g}; it must be above 1, or 0 to be chosen")


def check_precision(config: RunConfig) -> None:
    """Raise ConfigError for a compute dtype that gains nothing over parameters of `model.dtype`, or excludes float8."""
    dtype, compute = config.model.dtype, config.model.compute_dtype
    if config.train.float8 and (dtype == "float64" or compute not in (AUTO, "bfloat16")):
        raise ConfigError(
            f'train.float8 is "{config.train.float8}", next to arithmetic in bfloat16, and model.dtype is "{dtype}" '
            f'with model.compute_dtype "{compute}"; use model.compute_dtype = "bfloat16" over float32 or bfloat16, or '
            "leave train.float8 out"
        )
    if compute in (AUTO, *_COMPUTE[dtype]):
        return
    bits = f"{compute} has {_BITS[compute]} significant bits, parameters and optimizer states in {dtype} {_BITS[dtype]}"
    cure = f'model.dtype = "{compute}"' if _BITS[compute] > _BITS[dtype] else 'model.dtype = "float32"'
    raise ConfigError(
        f'model.compute_dtype is "{compute}" and model.dtype is "{dtype}": {bits}, which only costs memory or time; '
        f"use {cure}, or model.compute_dtype = {' or '.join(map(repr, _COMPUTE[dtype]))}"
    )


def check_preset(config: RunConfig) -> None:
    """Raise ConfigError for degrees that a preset's sizes do not allow; other models are checked when loaded."""
    if not (name := config.model.preset_name):
        return
    parallel, values = config.parallel, PRESETS[name].values
    layers, heads = values["num_hidden_layers"], values["num_key_value_heads"]
    experts = read_experts(values).of_layer
    if (stages := parallel.pp * parallel.vpp) > layers:
        raise ConfigError(
            f"parallel.pp {parallel.pp} x parallel.vpp {parallel.vpp} make {stages} pipeline stages, and "
            f"model.preset {name!r} has {layers} layers, at least one for each; use fewer stages, or a model of more "
            "layers (qwen3-deep-tiny has 4)"
        )
    if heads % parallel.tp:
        raise ConfigError(
            f"parallel.tp {parallel.tp} does not divide the {heads} key/value heads of model.preset {name!r}; use "
            f"{' or '.join(str(tp) for tp in range(1, heads + 1) if heads % tp == 0)}"
        )
    if parallel.ep > 1 and (not experts or experts % parallel.ep):
        lack = f"does not divide the {experts} experts" if experts else "deals out experts, there are none"
        raise ConfigError(f"parallel.ep {parallel.ep} {lack} of model.preset {name!r}; use {_EXPERT_PRESETS}, or ep 1")
    if not experts and max(config.train.router_balance_loss, config.train.router_z_loss) > 0:
        raise ConfigError(
            f"train.router_balance_loss is {config.train.router_balance_loss} and train.router_z_loss is "
            f"{config.train.router_z_loss}, and model.preset {name!r} has no routers; use {_EXPERT_PRESETS}, or 0"
        )


def check_lora(config: RunConfig) -> None:
    """Raise ConfigError for adapters that cannot be trained so, and for keys of [lora] without an adapter (rank 0).

    Dropout excludes tensor parallelism, of the model or of the encoder that the adapter is in; stochastic rounding
    excludes adapters.
    """
    lora = config.lora
    if not lora.rank:
        if lora != LoraSection():
            raise ConfigError(
                f"[lora] has alpha {lora.alpha:g}, dropout {lora.dropout:g}, targets {list(lora.targets)} and parts "
                f"{list(lora.parts)}, and lora.rank is 0: there is no adapter; set lora.rank = 16, say, or leave them "
                "out"
            )
        return
    if find_spec("peft") is None:
        raise ConfigError(
            f"lora.rank is {lora.rank}, and peft, which makes adapters, is not installed: pip install 'longspan[lora]'"
        )
    _check_adapter_parts(config)
    if lora.dropout >= 1:
        raise ConfigError(f"lora.dropout is {lora.dropout:g}; it must be below 1")
    if lora.dropout and TOWER_PARTS & {*lora.parts} and config.encoder.tp > 1:
        raise ConfigError(
            f"lora.dropout is {lora.dropout:g} and encoder.tp is {config.encoder.tp}: tensor-parallel ranks would drop "
            "different inputs of the same rows; set lora.dropout = 0.0, or encoder.tp = 1"
        )
    if lora.dropout and config.parallel.tp > 1:
        raise ConfigError(
            f"lora.dropout is {lora.dropout:g} and parallel.tp is {config.parallel.tp}: tensor-parallel ranks would "
            "drop different inputs of the same rows; set lora.dropout = 0.0, or parallel.tp = 1"
        )
    if config.train.stochastic_rounding:
        raise ConfigError(
            "train.stochastic_rounding rounds updates of bfloat16 parameters, and adapters (lora.rank) are float32 "
            "over a bfloat16 model too; leave it out"
        )


def _check_adapter_parts(config: RunConfig) -> None:
    """Raise ConfigError for parts of [lora] that no model has, and for parts that [encoder] trains whole."""
    parts = config.lora.parts
    if not parts or not {*parts} <= {*PARTS} or len({*parts}) < len(parts):
        raise ConfigError(f"lora.parts is {list(parts)}; name some of {', '.join(PARTS)}, each once")
    train = config.encoder.train
    trained_parts = {"all": (PROJECTOR, TOWER), "projector": (PROJECTOR,)}.get(train, ())
    if trained_whole := [part for part in parts if part in trained_parts]:
        raise ConfigError(
            f"lora.parts has {trained_whole[0]!r}, and encoder.train is {train!r}, which trains its weights whole; "
            "leave one out"
        )


def check_mtp_section(config: RunConfig) -> None:
    """Raise ConfigError for multi-token prediction that cannot be trained so, and for its keys without any depth."""
    mtp = config.mtp
    if not mtp.depths:
        if mtp != MtpSection():
            raise ConfigError(
                f"[mtp] has loss_weight {mtp.loss_weight:g}, weights {mtp.weights!r} and train_whole "
                f"{str(mtp.train_whole).lower()}, and mtp.depths is 0: there is no multi-token prediction; set "
                "mtp.depths = 1, say, or leave them out"
            )
        return
    if mtp.train_whole and not config.lora.rank:
        raise ConfigError(
            "mtp.train_whole is true: it trains depths whole with adapters, and lora.rank is 0, so that all weights "
            "are trained; leave it out, or set lora.rank = 16, say"
        )
    if mtp.weights not in (AUTO, RANDOM) and not Path(mtp.weights).is_dir():
        raise ConfigError(
            f"mtp.weights is {mtp.weights!r}, which is no folder; name one with weights of depths, {AUTO!r} or "
            f"{RANDOM!r}"
        )


def parts_with_adapter(config: RunConfig) -> list[str]:
    """List the parts of the encoder (projector, tower) that get an adapter; none without [lora]."""
    return [part for part in config.lora.parts if config.lora.rank and part in TOWER_PARTS]


def check_encoder_keys(config: RunConfig, home: Layout) -> None:
    """Raise ConfigError for an encoder.tp that does not divide the ranks, and for a rate where no part is trained."""
    encoder = config.encoder
    if len(home.ranks) % encoder.tp:
        fitting = ", ".join(str(tp) for tp in range(1, len(home.ranks) + 1) if len(home.ranks) % tp == 0)
        are = "is" if len(home.ranks) == 1 else "are"
        raise ConfigError(
            f"encoder.tp is {encoder.tp}, and there {are} {plural(len(home.ranks), 'rank')}; use {fitting}"
        )
    if encoder.train == "none" and encoder.lr and not parts_with_adapter(config):
        raise ConfigError(f'encoder.lr is {encoder.lr:g} and encoder.train is "none"; leave out one of them')


def check_image_keys(config: RunConfig, images: int) -> None:
    """Raise ConfigError where [encoder], or an adapter of it, is given and the data has no images.

    [encoder] counts as given if it differs from its defaults, before and after encoder.train is resolved.
    """
    if not images and (parts := parts_with_adapter(config)):
        raise ConfigError(
            f"lora.parts has {', '.join(parts)}, and no row of the data has images; leave it out, or give rows with "
            "images (docs/multimodal.md)"
        )
    if not images and config.encoder not in (EncoderSection(), EncoderSection(train=encoder_default(config))):
        raise ConfigError(
            "[encoder] is given, and no row of the data has images; leave it out, or give rows with images "
            "(docs/multimodal.md)"
        )
