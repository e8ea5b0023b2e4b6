"""Whether the values of a configuration fit together and fit the ranks, before any process group exists.

What needs the data or the model (names of adapted linears, the weights of a folder, a list of types as long as the
layers) is checked by the run once it has them, still before the first collective of a step.
"""

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from longspan.adapter_folder import adapter_folder_advice
from longspan.checkpoint.files import require_local_root
from longspan.config.defaults import encoder_is_given
from longspan.config.keys import AUTO, NOT_GIVEN, key_value, section_keys
from longspan.config.loss_arguments import loss_arguments
from longspan.config.memory_keys import keys_of_states_on_host
from longspan.config.plan_section import EvalConfig, name_of_key
from longspan.config.sections import RANDOM, RunConfig, held_out_set, section_kinds
from longspan.config.text_values import BestFigure, NamedGroup
from longspan.corpus.rows.kinds import COLUMNS
from longspan.corpus.sources.find_files import STDLIB, find_files
from longspan.errors import ConfigError, import_object, plural
from longspan.layout import Layout
from longspan.model import PRESETS
from longspan.plain_text import nearest_hint
from longspan.plan.check import COMM_TYPES
from longspan.plan.kernel_names import KERNEL_NAMES
from longspan.plan.memory.settings import UPDATES_PARTS
from longspan.resolve.planner_config import PlannerConfig, check_planner_exists, home_of
from longspan.resolve.run_cost import read_run_machine
from longspan.run.loggers import check_logger
from longspan.train.optim.schedule import Schedule

# By dtype of the parameters: in which dtypes a model may compute.
_COMPUTE = {"float32": ("float32", "bfloat16"), "bfloat16": ("bfloat16",), "float64": ("float64",)}
# These are the bits of a number's significand.
_BITS = {"float64": 53, "float32": 24, "bfloat16": 8}


def check_config(config: RunConfig, ranks: int, *, training: bool = True) -> Layout:
    """Return the home of the run on `ranks` ranks, if every value is possible there.

    Without `training` learning rate, loggers and plans of steps are not checked. Raises ConfigError or
    LayoutError.
    """
    checkpoint = config.checkpoint
    check_model_keys(config, training=training)
    check_data(config)
    if config.evaluation.sets:
        check_eval_sets(config)
    if training:
        for name in config.run.loggers:
            check_logger(name)
        if checkpoint.keep_best:
            figure = BestFigure.from_text(checkpoint.keep_best)
            every = {entry.name: entry.every for entry in config.evaluations}
            figure.check_sets(every)
            if config.evaluation.patience and not every[figure.set]:
                raise ConfigError(
                    f"evaluation.patience is {config.evaluation.patience}, and {figure.set or 'held-out documents'} "
                    "are evaluated after the last step alone (every = 0); set every, or leave patience out"
                )
        if checkpoint.dir:
            require_local_root(checkpoint.dir)
    check_keys_needed_by_keys(config)
    check_distillation(config)
    home = home_of(config.parallel, ranks)
    check_precision(config)
    if config.train.loss or config.train.loss_arguments:
        loss_arguments(config.train)
        if not config.train.loss and config.model.num_labels != 1:
            raise ConfigError(
                f"train.loss_arguments has {config.train.loss_arguments[0]}, which needs model.num_labels 1, and "
                f"model.num_labels is {config.model.num_labels}"
            )
    if home.ep > 1:
        check_parallel(home)
    if config.encoder.tp > 1:
        check_encoder_tp_divides_ranks(config, home)
    check_optimizer(config)
    check_plans(config, home, training=training)
    return home


def check_keys_needed_by_keys(config: RunConfig) -> None:
    """Raise ConfigError for a key that is not at its default and does nothing beside other keys (its `Needs`)."""
    for section, kind in section_kinds().items():
        for key in section_keys(kind):
            value = key_value(getattr(config, section), key.name)
            for need in key.needs if value != key.default else ():
                # The need belongs to another value of the key.
                if need.value not in ("", value):
                    continue
                other_section, _, other = need.key.partition(".")
                if not need.allows(other_value := key_value(getattr(config, other_section), other)):
                    raise ConfigError(
                        f"{section}.{key.name} is {value!r}, which needs {need}, and {need.key} is "
                        f"{other_value!r}; set it, or leave {section}.{key.name} out"
                    )


# ---- data


def check_data(config: RunConfig) -> None:
    """Raise ConfigError for keys that name documents twice or not at all, for epochs of sources of which none is named,
    and for columns that rows cannot have.
    """
    data = config.data
    count = len(config.data.sources)
    if count and data.split:
        raise ConfigError(
            f"data.split is {data.split!r} and there are {count} tables [[data.sources]]; give it in each"
        )
    if count and data.path:
        raise ConfigError(
            f"data.path is {data.path!r} and there are {count} tables [[data.sources]]; give one of them"
        )
    counted = config.train.epochs_of
    paths = [source.path for source in data.sources]
    if config.train.epochs and (count > 1 or counted) and counted not in paths:
        raise ConfigError(
            f"train.epochs_of is {counted!r}, train.epochs {config.train.epochs:g}; [[data.sources]] have the paths "
            f"{', '.join(map(repr, paths)) or 'none'}; name the one whose epochs count as train.epochs_of, or give "
            "train.steps in place of train.epochs, or, if all rows are of one kind, one folder with their files"
        )
    for column in data.rename_columns:
        ours, equals, theirs = column.partition("=")
        if not equals or (theirs and ours not in COLUMNS):
            raise ConfigError(
                f"data.rename_columns has {column!r}; give OURS=THEIRS, as in prompt=question, or OURS= to leave a "
                f"column "
                f"out; OURS is one of {', '.join(COLUMNS)}"
            )
    for number, source in enumerate(data.sources):
        if not source.path:
            raise ConfigError(f"data.sources[{number}].path is empty; name a folder or file of rows")


def check_paths_exist(config: RunConfig) -> None:
    """Raise ConfigError or DataError for a model, a tokenizer or texts that are not there; no file is read."""
    model = config.model
    data = config.data
    paths = {"model.path": model.path, "model.config": model.config, "data.tokenizer": data.tokenizer}
    paths |= {
        "teacher.path": config.teacher.path,
        "data.chat_template": data.chat_template,
        "evaluation.prompts": config.evaluation.prompts,
    }
    for key, path in paths.items():
        if path and not Path(path).expanduser().exists():
            raise ConfigError(f"{key} {path!r} does not exist; give a folder or file of this machine")
    run_dir = Path(config.run.dir)
    leave_out = (run_dir,)
    if not (run_dir / "corpus").exists():  # a run that has its documents reads no texts
        for number, source in enumerate(data.sources):
            find_files(source.path, split=source.split, leave_out=leave_out, key=f"data.sources[{number}].path")
        if not data.sources:
            find_files(data.path or STDLIB, split=data.split, leave_out=leave_out)
    for entry in config.evaluation.sets:
        find_files(entry.path, split=entry.split, leave_out=leave_out, key=f"{entry.prefix}path")


def check_eval_sets(config: RunConfig) -> None:
    """Raise ConfigError for a table of [[evaluation.sets]] without a path, or without a name of its own."""
    names = [entry.name for entry in config.evaluation.sets]
    for number, entry in enumerate(config.evaluation.sets, 1):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", entry.name):
            raise ConfigError(
                f"table {number} of [[evaluation.sets]] has name = {entry.name!r}; give one of letters, digits, -, _ "
                f"and dots "
                "that begins with a letter or digit: it names lines of metrics.jsonl and a folder"
            )
        if not entry.path:
            raise ConfigError(f"{entry.prefix}path is empty; name a folder or file of texts")
        if (count := names.count(entry.name)) > 1:
            tables = f"{count} of {len(names)} tables [[evaluation.sets]]"
            raise ConfigError(f"{tables} have name = {entry.name!r}; give each a name of its own")


# ---- the model


def check_model_keys(config: RunConfig, *, training: bool) -> None:
    """Raise ConfigError for keys that name several models, an unknown preset or an adapter as the model, for an adapter
    or weights of depths that cannot be, and with `training` where there is no learning rate.
    """
    model = config.model
    keys = [f"model.{key} = {name!r}" for key in ("path", "config", "preset") if (name := getattr(model, key))]
    if len(keys) > 1:
        raise ConfigError(
            f"{' and '.join(keys)} name more than one model; keep path to train a folder's weights, config for random "
            "weights of a configuration, or preset"
        )
    if model.preset_name and model.preset_name not in PRESETS:
        raise ConfigError(f"model.preset is {model.preset!r}; {nearest_hint(model.preset, PRESETS)}")
    if model.path and (advice := adapter_folder_advice(Path(model.path))):
        raise ConfigError(f"model.path is {model.path!r}, and {advice}")
    if training and config.optimizer.lr == NOT_GIVEN:
        raise ConfigError(
            f"optimizer.lr is not given, and {model.source or model.preset} has no default; give --optimizer.lr: often "
            "1e-6 to 2e-5 to train weights on, 1e-4 to 1e-3 from random ones"
        )
    if training and not config.optimizer.lr:
        raise ConfigError("optimizer.lr is 0.0; it must be above 0")
    if config.lora.rank:
        check_lora(config)
    weights = config.mtp.weights
    if weights not in (AUTO, RANDOM) and not Path(weights).is_dir():
        raise ConfigError(
            f"mtp.weights is {weights!r}, which is no folder; name one with weights of depths, {AUTO!r} or {RANDOM!r}"
        )


def check_precision(config: RunConfig) -> None:
    """Raise ConfigError for arithmetic that the dtype of the parameters, or float8, does not go with."""
    dtype = config.model.dtype
    compute = config.model.compute_dtype
    float8 = config.train.float8
    if float8 and (dtype == "float64" or compute not in (AUTO, "bfloat16")):
        raise ConfigError(
            f'train.float8 is "{float8}", next to arithmetic in bfloat16, and model.dtype is "{dtype}" with '
            f'model.compute_dtype "{compute}"; use model.compute_dtype = "bfloat16" over float32 or bfloat16'
        )
    if compute not in (AUTO, *_COMPUTE[dtype]):
        cure = f'model.dtype = "{compute if _BITS[compute] > _BITS[dtype] else "float32"}"'
        raise ConfigError(
            f'model.compute_dtype is "{compute}" and model.dtype is "{dtype}": {compute} has {_BITS[compute]} '
            f"significant bits, parameters and optimizer states in {dtype} {_BITS[dtype]}, which only costs memory or "
            f"time; use {cure}, or model.compute_dtype = {' or '.join(map(repr, _COMPUTE[dtype]))}"
        )


def check_lora(config: RunConfig) -> None:
    """Raise ConfigError where peft is not installed, and for dropout that tensor-parallel ranks would draw apart."""
    lora = config.lora
    tp = config.parallel.tp
    if find_spec("peft") is None:
        raise ConfigError(
            f"lora.rank is {lora.rank}, and peft, which makes adapters, is not installed: pip install 'longspan[lora]'"
        )
    if lora.dropout and tp > 1:
        raise ConfigError(
            f"lora.dropout is {lora.dropout:g} and parallel.tp is {tp}: tensor-parallel ranks would drop different "
            "inputs of the same rows; set lora.dropout = 0.0, or parallel.tp = 1"
        )


def check_distillation(config: RunConfig) -> None:
    """Raise ConfigError for keys of a teacher or of its loss without a teacher, and for a run that can have none."""
    if not config.distils:
        for section in (config.teacher, config.distillation):
            given = (key for key in section_keys(type(section)) if key_value(section, key.name) != key.default)
            if (key := next(given, None)) is not None:
                raise ConfigError(
                    f"{section.prefix}{key.name} is {key_value(section, key.name)!r}, and there is no teacher; give "
                    "teacher.path, or leave it out"
                )
        return
    reasons = {
        f"train.loss is {config.train.loss!r}, a loss of preferences": bool(config.train.loss),
        f"model.num_labels is {config.model.num_labels}, and scores have no teacher": config.model.num_labels > 0,
        f"mtp.num_layers is {config.mtp.num_layers}, and depths have no teacher": config.mtp.num_layers > 0,
        f"parallel.pp is {config.parallel.pp}, and no pipeline has a teacher": config.parallel.pp > 1,
        "model.path is the same folder, stored alike: a model that begins as its own teacher learns nothing from it": (
            config.teacher.path == config.model.path and config.teacher.frozen == config.model.frozen
        ),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        raise ConfigError(f"teacher.path is {config.teacher.path!r}, and {reason}; leave one of both out")


def check_encoder_tp_divides_ranks(config: RunConfig, home: Layout) -> None:
    """Raise ConfigError where encoder.tp does not divide the ranks, over all of which an encoder's home lies."""
    encoder = config.encoder
    count = len(home.ranks)
    if count % encoder.tp:
        fitting = ", ".join(str(tp) for tp in range(1, count + 1) if count % tp == 0)
        ranks = f"{'is' if count == 1 else 'are'} {plural(count, 'rank')}"
        raise ConfigError(f"encoder.tp is {encoder.tp}, and there {ranks}; use {fitting}")


def refuse_encoder_without_images(config: RunConfig, images: int) -> None:
    """Raise ConfigError where [encoder] is given and the data have no `images`."""
    if not images and encoder_is_given(config):
        raise ConfigError(
            "[encoder] is given, and no row of the data has images; leave it out, or give rows with images "
            "(docs/multimodal.md)"
        )


# ---- layout and optimizer


def check_parallel(home: Layout) -> None:
    """Raise ConfigError where ep does not divide the slots over which one copy of the weights is sharded."""
    copy_slots = home.slots // home.dp_replicate
    if copy_slots % home.ep:
        raise ConfigError(
            f"parallel.ep {home.ep} does not divide the {copy_slots} slots of each of parallel.dp_replicate "
            f"{home.dp_replicate} copies; use an ep that divides {copy_slots}, or fewer copies"
        )


def check_optimizer(config: RunConfig) -> None:
    """Raise ConfigError for a schedule, a class, its arguments or its groups that no optimizer can be made of, and for
    offloading that does not suit its class.

    Any optimizer but plain adamw is made once, of one small matrix; that imports torch.
    """
    optimizer = config.optimizer
    named_groups = [*map(NamedGroup.from_text, optimizer.groups)]
    if not config.train.epochs:  # otherwise the number of steps follows from the corpus
        Schedule.of(optimizer, config.train.steps)
    if optimizer.class_ != "adamw" or optimizer.arguments:
        # `--help` does without torch.
        from torch import nn

        from longspan.train.optim.optimizer import EIGHT_BIT_NEEDS, OptimizerChoice
        from longspan.train.optim.parameter_groups import parameter_groups

        choice = OptimizerChoice.from_section(optimizer)
        # muon takes matrices in layers alone.
        matrix = nn.Sequential(nn.Linear(2, 2, bias=False))
        if optimizer.stochastic_rounding and not choice.is_one_pass:
            raise ConfigError(
                "optimizer.stochastic_rounding rounds updates of adamw with betas, eps and maximize alone; "
                f"optimizer.class is {optimizer.class_!r} with {list(optimizer.arguments)}: use that adamw, or leave "
                "rounding out"
            )
        if optimizer.moments and not choice.is_one_pass:
            raise ConfigError(
                f"optimizer.moments is {optimizer.moments!r}, {EIGHT_BIT_NEEDS}; optimizer.arguments are "
                f"{list(optimizer.arguments)}: leave one of both out"
            )
        groups = parameter_groups(matrix, optimizer.class_, optimizer.weight_decay, None, named_groups)
        choice.build(groups)  # does it accept its arguments?
    offload_keys = keys_of_states_on_host(config)
    if offload_keys and (optimizer.moments or optimizer.class_ not in UPDATES_PARTS):
        moments = f" with optimizer.moments = {optimizer.moments!r}" if optimizer.moments else ""
        raise ConfigError(
            f"{offload_keys[0]} is true, and optimizer.class {optimizer.class_!r}{moments} is not known to update each "
            "number by itself, as moments on the host need; leave it out, or use adamw without optimizer.moments"
        )


# ---- plans


def _check_known_or_dotted(key: str, name: str, known: Sequence[str]) -> None:
    if "." in name and import_object(name, f"{key} is {name!r}") is None:
        raise ConfigError(f"{key} is {name!r}, which its module does not have")
    if "." not in name and name not in known:
        raise ConfigError(f"{key} is {name!r}; {nearest_hint(name, known)}, or the dotted name of your own")


def check_plans(config: RunConfig, home: Layout, *, training: bool) -> None:
    """Raise ConfigError for planners, degrees, types and rows that are impossible on this home, or hold no document of
    the greatest length.

    Plans of evaluations are checked, with `training` those of steps too. No plan is made, and no model is read.
    """
    context = config.context
    if config.run.machine:
        read_run_machine(config)  # raises for a file that holds none
    if context.attention_kernel:
        _check_known_or_dotted("context.attention_kernel", context.attention_kernel, KERNEL_NAMES)
    for entry in config.evaluations:
        if entry.context_parallel_size == AUTO and entry.planner not in ("fixed", AUTO):
            raise ConfigError(
                f'{entry.prefix}context_parallel_size is "{AUTO}", which chooses one degree for plans of packed '
                f'documents, and evaluation.planner is "{entry.planner}"; use evaluation.planner = "fixed", or '
                f"leave {entry.prefix}context_parallel_size out"
            )
    for choice, cut_by, limit in _choices_and_limits(config, training=training):
        check_planner_exists(choice.planner, name_of_key(choice.prefix, "planner"))
        for kind in choice.options.types:
            _check_known_or_dotted(name_of_key(choice.prefix, "cp_comm_type"), kind, COMM_TYPES)
        if choice.has_one_degree and choice.degree and home.slots % choice.degree:
            ranks = choice.degree * home.tp * home.pp
            raise ConfigError(
                f"{choice.degree_key} {choice.degree} does not divide {plural(home.slots, 'slot')} "
                f"({plural(len(home.ranks), 'rank')} / tp {home.tp} / pp {home.pp}); use "
                f"{' or '.join(str(d) for d in range(1, home.slots + 1) if home.slots % d == 0)}, or start a multiple "
                f"of {ranks} processes (--world {ranks}, or torchrun)"
            )
        choice.check_longest_document(limit or 1, home, f"{cut_by} {limit or 1}")


def check_longest_training_document(
    config: RunConfig, home: Layout, longest: int, origin: str, heads: int | None = None
) -> None:
    """Raise ConfigError where the longest document of the corpus, of `longest` tokens and the file `origin`, fits no
    group of slots; `heads` as of `_choices_and_limits`.
    """
    for choice, cut_by, _ in _choices_and_limits(config.with_sets(()), training=True, heads=heads):
        _check_document_fits(choice, cut_by, home, longest, f"the longest document ({longest} tokens, of {origin})")


def check_longest_of_set(
    config: RunConfig, entry: EvalConfig, home: Layout, longest: int, origin: str, heads: int | None = None
) -> None:
    """Raise ConfigError where the longest document of an evaluation set, of `longest` tokens and the file `origin`,
    fits no group of slots.
    """
    choice = PlannerConfig.unpriced(entry, config, heads)
    title = f"the longest document of set {entry.name!r}"
    _check_document_fits(
        choice, f"{entry.prefix}max_document_tokens", home, longest, f"{title} ({longest} tokens, of {origin})"
    )


def _choices_and_limits(
    config: RunConfig, *, training: bool, heads: int | None = None
) -> Iterator[tuple[PlannerConfig, str, int]]:
    """`heads` are the model's query heads; None: those of a preset, else unknown. A limit of 0 or less cuts nothing."""
    if heads is None and config.model.preset_name:
        heads = PRESETS[config.model.preset_name].values["num_attention_heads"]
    limit = "data.max_document_tokens", config.data.max_document_tokens
    if training:
        yield (PlannerConfig.unpriced(config.context, config, heads), *limit)
    # Without training, evaluations are all there is.
    if config.evaluation.documents != 0 or not training:
        held_out = held_out_set(config)
        yield (PlannerConfig.unpriced(held_out, config, heads), *limit)
    for entry in config.evaluation.sets:
        choice = PlannerConfig.unpriced(entry, config, heads)
        yield choice, f"{entry.prefix}max_document_tokens", entry.max_document_tokens


def _check_document_fits(choice: PlannerConfig, cut_by: str, home: Layout, longest: int, title: str) -> None:
    """`cut_by` is the key that would cut the document, `title` its name in the error."""
    try:
        choice.check_longest_document(longest, home, title)
    except ConfigError as error:
        if not choice.options.max_tokens_per_slot:
            raise
        # `wider`: the key that lets the document have more slots
        rows = -(-longest // home.slots)
        wider = ""
        if choice.has_one_degree and choice.degree and choice.degree < home.slots:
            wider = f' ({choice.degree_key} = {home.slots} or {name_of_key(choice.prefix, "planner")} = "dynamic")'
        elif choice.planner == "dynamic" and choice.max_degree and choice.max_degree < home.slots:
            wider = f" ({name_of_key(choice.prefix, 'max_dynamic_context_parallel_size')} = 0)"
        raise ConfigError(
            f"{error}. It needs {rows:,} rows of each of all {plural(home.slots, 'slot')}{wider}; {cut_by} cuts longer "
            "texts"
        ) from error
