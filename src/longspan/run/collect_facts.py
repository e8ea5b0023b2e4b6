"""The facts of a run at the start of a session, read from its model, world, plans and corpus."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from longspan.comm import World
from longspan.config.defaults import source_dtype
from longspan.config.loss_arguments import loss_arguments, loss_text
from longspan.config.sections import RunConfig, held_out_set
from longspan.config.text_values import NamedGroup
from longspan.data.run_epochs import most_step_tokens
from longspan.errors import plural
from longspan.files import read_json
from longspan.host import usable_cores
from longspan.model.execution import Execution, model_execution
from longspan.model.marks import packed_weights
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan.shape.model_shape import read_experts
from longspan.plan.shape.name_patterns import meets_any
from longspan.resolve.planner_config import PlannerConfig
from longspan.run.facts import RunFacts, time_and_command
from longspan.run.run_data import TrainingRun
from longspan.ssm.kernels import describe_kernels
from longspan.train.gradient_norm import counted_parameters
from longspan.train.optim.parameter_groups import find_named_group, names_of_parameters
from longspan.train.step_figures import world_device_name


def collect_facts(run: TrainingRun) -> RunFacts:
    """Return the facts of a run; entered by all ranks."""
    world = run.world
    home = run.world.home
    earlier = tuple[tuple[int, int], ...]()
    with suppress(OSError, ValueError):
        facts = RunFacts.from_json(read_json(run.dir / "run.json"))
        earlier = facts.sessions if facts is not None else ()
    # A session that began at this one's step, or later, is left out: its steps are repeated.
    sessions = (*(session for session in earlier if session[0] < run.done), (run.done, len(home.ranks)))
    parameters, parameters_of_rank, trained = _count_parameters(run, run.model)
    names_parameters = run.config.optimizer.groups or run.config.train.freeze
    by_pattern = _count_by_pattern(run) if names_parameters else {}
    date, command = time_and_command()
    return RunFacts(
        lines=tuple(_fact_lines(run, parameters, parameters_of_rank, trained, sessions, by_pattern)),
        parameters=parameters,
        parameters_of_rank=parameters_of_rank,
        trained=trained,
        device=world_device_name(world),
        ranks=len(home.ranks),
        node_size=world.node_size,
        hosts=_count_hosts(world),
        priced_for=run.cost.source or "",
        steps=run.config.train.steps,
        done=run.done,
        date=date,
        command=command,
        sessions=sessions,
        memory=run.memory.to_json() if run.memory is not None else {},
    )


def gradient_sums_text(execution: Execution, slots: int) -> str:
    """Say in which types gradients are summed: one slot has sums over micro-batches alone."""
    reduced, added = execution.reduce_dtype, execution.added_dtype or execution.reduce_dtype
    over_slots, over_batches = (str(dtype).removeprefix("torch.") for dtype in (reduced, added))
    if slots == 1 or reduced == added:
        return f"gradients summed in {over_batches}"
    return f"gradients summed over slots in {over_slots}, over micro-batches in {over_batches}"


def _frozen_dtype_text(config: RunConfig, dtype: str) -> str:
    published = source_dtype(config.model)
    source = "folder" if config.model.source else "preset"
    adapters = "float64" if dtype == "float64" else "float32"
    if dtype == published:
        return f"frozen weights keep the {source}'s {dtype} (model.dtype), adapters {adapters}"
    other = f" (model.dtype; the {source} has {published})" if published else " (model.dtype)"
    return f"frozen weights {dtype}{other}, adapters {adapters}"


def _count_hosts(world: World) -> int:
    """`node_size` counts slots, of tp ranks each."""
    return -(-len(world.home.ranks) // (world.node_size * world.home.tp))


def _fact_lines(
    run: TrainingRun,
    parameters: int,
    of_rank: int,
    trained: int,
    sessions: Sequence[tuple[int, int]],
    by_pattern: Mapping[str, int],
) -> Iterator[tuple[str, str]]:
    """In the order in which facts are shown. Parameters are counted in the whole model, on the rank that holds most,
    and those that are trained; `by_pattern` has those of each entry of optimizer.groups and train.freeze."""
    config = run.config
    home = run.world.home
    lengths = run.corpus.lengths
    execution = model_execution(run.model)
    experts = read_experts(run.model.config)
    mtp = config.mtp
    sizes = f"{_count_text(parameters)} parameters, {_count_text(of_rank)} on a rank"
    sizes += f", {_count_text(trained)} trained" if config.lora.rank or config.train.freeze else ""
    sizes += f", {experts.of_token} of {experts.of_layer} experts a token" if experts.of_layer else ""
    yield "model", f"{config.model.source or config.model.preset}: {sizes}"
    dtypes = execution.parameter_dtype, execution.compute_dtype
    parameter, compute = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    weights = _frozen_dtype_text(config, parameter) if config.lora.rank else f"parameters {parameter}"
    yield "precision", f"{weights}, compute {compute}, {gradient_sums_text(execution, home.slots)}"
    yield "devices", _device_text(run)
    slots = plural(home.slots, "slot") + (f" ({run.world.node_size} a host)" if _count_hosts(run.world) > 1 else "")
    # parallel.vpp is no degree of a home, but is shown among them
    degrees = {"tp": home.tp, "pp": home.pp, "vpp": config.parallel.vpp, "ep": home.ep}
    degrees["dp_replicate"] = home.dp_replicate
    words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    words += ["sequence-parallel"] * config.parallel.sequence_parallel
    yield "layout", ", ".join([f"{slots} for the documents", *words])
    kernels = "; ".join(execution.kernel_texts) or "chosen in the first pass"
    yield "attention", f"{'/'.join(dict.fromkeys(run.training_choice.options.types))}; kernel {kernels}"
    depths = f"{plural(mtp.num_layers, 'depth')} of multi-token prediction, loss weight {mtp.loss_scaling_factor:g}"
    optional = {
        **execution.words,
        "mixers": mixers_text(execution, run.world.device, config.context.partition) if execution.mixers else "",
        "mtp": depths if mtp.num_layers else "",
        "encoder": _encoder_text(run, run.model) if isinstance(run.model, MultimodalModel) else "",
        "scores": "" if run.corpus.labels is None else _scores_text(run, run.corpus.labels.shape[1]),
        "loss": _preferences_text(run) if config.train.loss else "",
        "teacher": "" if run.teacher is None else _teacher_text(run, run.teacher),
        "rows": run.reasons.partition,
    }
    yield from ((name, text) for name, text in optional.items() if text)
    cap = run.training_choice.options.max_tokens_per_slot
    free = ", free" if config.context.mode == "free" else ""
    rows = f"at most {plural(cap, 'row')} a slot" if cap else "any number of rows a slot"
    reasons = [reason.removeprefix("evaluation ") for reason in run.reasons.degrees]
    # a reason that begins so is of held-out documents, whose degree was chosen: it has a line of its own, below
    degree_is_chosen = any(reason.startswith("at cp ") for reason in reasons)
    held_out_plans = PlannerConfig.unpriced(held_out_set(config), config)
    evaluated = f"; evaluation {held_out_plans.text}" if run.held_out and not degree_is_chosen else ""
    priced = f"; priced for {run.cost.source}" if run.cost.source else ""
    yield "plans", f"{run.reasons.planner or run.training_choice.text}{free}, {rows}{evaluated}{priced}"
    yield from (("evaluation", reason) for reason in reasons)
    # Of KTO's documents every other one is a prompt with another row's answer.
    step = 2 if config.train.row_form == "kto" else 1
    lengths = lengths[::step]
    held_out = f", {len(run.held_out) // step:,} of them held out" if run.held_out else ""
    documents = (
        f"{plural(len(lengths), 'answer' if step > 1 else 'document')} of {plural(int(lengths.sum()), 'token')}"
    )
    yield "data", f"{documents}, longest {int(lengths.max()):,}{held_out}"
    done = f", of which {run.done:,} are done" if run.done else ""
    yield "steps", f"{config.train.steps:,}{done}, each of up to {most_step_tokens(config, run.order):,} tokens"
    if resumed := [f"at step {step:,} on {plural(ranks, 'rank')}" for step, ranks in sessions if step]:
        yield "resumed", ", ".join(resumed)
    yield "optimizer", f"{config.optimizer.class_}, lr {config.optimizer.lr:g} at most"
    for key, texts in (("groups", config.optimizer.groups), ("freeze", config.train.freeze)):
        yield from ((key, f"{text}: {_count_text(by_pattern[text])} parameters") for text in texts)
    yield "report", f"{run.dir}/report.html when the run ends; to watch it: longspan report {run.dir} --follow"
    if run.figures.uncounted:
        yield "no MFU", f"model FLOPs are not counted: {run.figures.uncounted}"
    for caution in filter(None, (execution.slow_kernel_reason(), *(s.caution for s in run.sets))):
        yield "caution", caution


def _device_text(run: TrainingRun) -> str:
    ranks = len(run.world.home.ranks)
    hosts = _count_hosts(run.world)
    figures = run.figures
    on_hosts = f", {hosts} hosts" if hosts > 1 else ""
    if run.world.device.type != "cuda":
        return f"{plural(ranks, 'process', 'es')} on {plural(usable_cores(), 'CPU core')}{on_hosts}, gloo"
    peak = f"; MFU is of {figures.peak:g} TFLOP/s each" if figures.peak and not figures.uncounted else ""
    return f"{ranks} x {world_device_name(run.world)}{on_hosts}, nccl{peak}"


def _count_text(count: int) -> str:
    """8190735360 → '8.19 B', from a million on in units."""
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:,}"


def _count_parameters(run: TrainingRun, model: Any) -> tuple[int, int, int]:
    """Entered by all ranks: (of the whole model, each once; on the rank that holds most; trained). Packed weights
    count as the numbers that they stand for. Every rank of a pipeline stage counts all parameters of the stage."""
    # These are parameters of this rank's stages.
    parameters = counted_parameters(model)
    packed = {id(model.get_parameter(name)): weight for name, weight in packed_weights(model).items()}

    def count(parameter: torch.Tensor, tensor: torch.Tensor) -> int:
        """Count the numbers in `tensor`, which is the whole parameter or this rank's part of it."""
        packed_weight = packed.get(id(parameter))
        return tensor.numel() if packed_weight is None else packed_weight.count_numbers(tensor)

    here = sum(count(p, p) for p in parameters)
    trained_here = sum(p.numel() for p in parameters if p.requires_grad)
    stored_here = sum(count(parameter, local_tensor(parameter)) for parameter in model.parameters())
    rank_counts = run.world.control.gather_objects((run.world.coordinates.pp, here, trained_here, stored_here))
    # The key is a pipeline rank.
    stage_counts = {pp: (count, trained) for pp, count, trained, _ in rank_counts}
    total = sum(count for count, _ in stage_counts.values())
    trained_total = sum(trained for _, trained in stage_counts.values())
    return total, max(stored for *_, stored in rank_counts), trained_total


def _count_by_pattern(run: TrainingRun) -> dict[str, int]:
    """Entered by all ranks. A trained parameter counts for the one group that gets it, a frozen one for each pattern
    of train.freeze that it meets."""
    groups = {text: NamedGroup.from_text(text) for text in run.config.optimizer.groups}
    frozen_patterns = run.config.train.freeze
    names = names_of_parameters(run.model)
    counts = Counter[str]()
    for parameter in counted_parameters(run.model):
        if parameter.requires_grad:
            group = find_named_group([*groups.values()], names[parameter])
            met = [text for text, named_group in groups.items() if named_group is group]
        else:
            met = [
                pattern
                for pattern in frozen_patterns
                if any(meets_any([pattern], name) for name in names[parameter])
            ]
        counts.update(dict.fromkeys(met, parameter.numel()))
    by_stage = dict(run.world.control.gather_objects((run.world.coordinates.pp, counts)))
    return sum(by_stage.values(), Counter[str]())


def mixers_text(execution: Execution, device: torch.device, partition: str) -> str:
    """Return in words how state-space layers run and how many states are sent."""
    kernels = describe_kernels(execution.compute_dtype, device)
    layers = f"{plural(execution.mixers, 'state-space layer')} in {kernels}"
    if partition == "contiguous":
        return f"{layers}; at most one state a slot and group is sent"
    return (
        f"{layers}; two states a document and slot are sent, at most one in all with context.partition contiguous"
    )


def _preferences_text(run: TrainingRun) -> str:
    reference = "the base model, without the adapter" if run.config.lora.rank else "the weights before step 1"
    count = plural(len(run.corpus) // 2, "answer" if run.config.train.row_form == "kto" else "pair")
    compared = f"; reference: {reference}" if run.config.train.needs_reference else ""
    return f"{loss_text(run.config.train)}; {count}{compared}"


def _teacher_text(run: TrainingRun, teacher: Any) -> str:
    keys = run.config.distillation
    execution = model_execution(teacher)
    dtype = str(execution.compute_dtype).removeprefix("torch.")
    layers = plural(teacher.config.get_text_config().num_hidden_layers, "layer")
    numbers, of_rank = (_count_text(count) for count in _count_parameters(run, teacher)[:2])
    words = [text for name, text in execution.words.items() if name in ("frozen", "on the host")]
    described = ", ".join([f"{numbers} parameters, {of_rank} on a rank", f"{layers} in {dtype}", *words])
    loss = f"divergence at beta {keys.beta:g}, temperature {keys.temperature:g}"
    if keys.top_k:
        rest = "the rest as one" if keys.add_tail else "renormalised"
        loss += f", of its {keys.top_k} likeliest tokens, {rest}"
    if keys.cross_entropy_weight:
        loss += f"; and {keys.cross_entropy_weight:g} × cross entropy"
    return f"{run.config.teacher.path}: {described}; {loss}"


def _scores_text(run: TrainingRun, columns: int) -> str:
    from longspan.train.terms.scores import default_problem_type

    scores = run.config.model.num_labels
    if run.corpus.unit == 1:
        loss = getattr(run.model.config, "problem_type", None) or default_problem_type(scores, columns)
    else:
        coefficient = loss_arguments(run.config.train)["center_rewards_coefficient"]
        loss = "-log σ(chosen - rejected - margin)"
        loss += f" + {coefficient:g} (chosen + rejected)²" if coefficient else ""
    return f"{plural(scores, 'score')} of the last token before padding (id {run.corpus.pad}); loss: {loss}"


def _encoder_text(run: TrainingRun, model: MultimodalModel) -> str:
    settings = run.config.encoder
    count = run.corpus.manifest.images
    (encoder,) = model.encoder_settings.values()
    parameters = sum(parameter.numel() for parameter in encoder.module.parameters())
    trained = {"all": "all trained", "projector": "its projector trained", "none": "not trained"}[
        settings.trainable
    ]
    slots = plural(encoder.world.home.slots, "slot") + (f" of tp {settings.tp}" if settings.tp > 1 else "")
    waves = f", at most {settings.max_tokens:,} rows of a slot at once" if settings.max_tokens else ""
    return f"{parameters:,} parameters on {slots}, {trained}; {plural(count, 'image')}{waves}"


_LISTED = 8  # groups of a level


def gather_attention_groups(world: World) -> list[str]:
    """List each kind of group that attention has bound on any rank, with the ranks of its levels; entered by all ranks.

    A kind with a single level has no word for it.

    >>> gather_attention_groups(world)
    ['a2a+p2p of 4 as a2a [0, 1] [2, 3], ring [0, 2] [1, 3]', 'p2p of 2 [0, 1] [2, 3]']
    """
    bound = set[Any]().union(*world.control.gather_objects(world.channels.attended, "gather of attention's groups"))
    ranks_of = dict[str, dict[str, list[str]]]()
    for kind, degree, level, ranks in sorted(bound):
        ranks_of.setdefault(f"{kind} of {degree}", {}).setdefault(level, []).append(str(list(ranks)))
    texts = list[str]()
    for kind, levels in ranks_of.items():
        has_levels = len(levels) > 1
        parts = list[str]()
        for level, groups in levels.items():
            level_name = f"{level} " if has_levels else ""
            more = " …" if len(groups) > _LISTED else ""
            parts.append(f"{level_name}{' '.join(groups[:_LISTED])}{more}")
        texts.append(f"{kind} {'as ' if has_levels else ''}{', '.join(parts)}")
    return texts
