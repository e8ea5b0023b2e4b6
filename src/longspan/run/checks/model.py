"""Whether [model] names one model that can be trained, and whether a preset's sizes allow the degrees."""

from longspan.config.bounds import NOT_GIVEN
from longspan.config.file import nearest
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError
from longspan.model import PRESETS
from longspan.plan.cost.model_shape import read_experts

_EXPERT_PRESETS = "qwen3-moe-tiny or gpt-oss-tiny (8 experts)"


def check_model(config: RunConfig, *, training: bool) -> None:
    """Raise ConfigError where [model] names no model or several, or scales its positions as it may not."""
    model = config.model
    named = [key for key in ("path", "config", "preset") if getattr(model, key)]
    if len(named) > 1:
        raise ConfigError(
            f"{' and '.join(f'model.{key} = {getattr(model, key)!r}' for key in named)} name more than one model; keep "
            "path to train a folder's weights, config for random weights of a configuration, or preset"
        )
    if model.preset_name and model.preset_name not in PRESETS:
        raise ConfigError(f"model.preset is {model.preset!r}; {nearest(model.preset, PRESETS)}")
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
    if model.rope_scaling and model.rope_scaling not in (known := ("yarn", "linear")):
        raise ConfigError(f"model.rope_scaling is {model.rope_scaling!r}; {nearest(model.rope_scaling, known)}")
    if model.rope_factor and not model.rope_scaling:
        raise ConfigError(f'model.rope_factor is {model.rope_factor:g} and model.rope_scaling is empty; use "yarn"')
    if 0 < model.rope_factor <= 1:
        raise ConfigError(f"model.rope_factor is {model.rope_factor:g}; it must be above 1, or 0 to be chosen")


def check_preset(config: RunConfig) -> None:
    """What a preset's sizes do not allow, before a corpus is read; a model's folder is checked once it is loaded."""
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
