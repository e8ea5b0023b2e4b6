"""The choice of the fastest plan of memory that fits: which settings and policies are tried, in which order.

The first layers of each stage have one policy and the others a faster one: as few of the first as fit.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product
from typing import Any

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plain_text import gib_text
from longspan.plan.cost.machine import Machine
from longspan.plan.form import CheckpointPolicy, FixedMemory
from longspan.plan.memory.memory_plan import MemoryNeeds, MemoryPlan
from longspan.plan.memory.settings import MemoryBudget, MemorySettings
from longspan.plan.plan import Plan

# Rows of a tile where the plan runs MLPs in tiles, the fastest first.
TILE_ROWS = (16384, 8192, 4096, 2048)
SEGMENT_LAYERS = 4  # layers of a segment that the plan chooses, where nothing else fits


def choose_memory(
    config: Any,
    home: Layout,
    plan: Plan | Sequence[Plan],
    settings: MemorySettings,
    budget: MemoryBudget,
    machine: Machine | None = None,
    *,
    fixed: FixedMemory | None = None,
) -> MemoryPlan:
    """Choose the fastest plan of memory that fits a budget; `plan` is a plan, or all plans of a run.

    >>> memory = choose_memory("Qwen3-8B/config.json", home, plan, MemorySettings(), budget)  # doctest: +SKIP

    Plans of memory are compared by the seconds that they add to the largest load, on the first pipeline stage; of equal
    ones the first choice wins. Segments, groups of layers that run forward once more in backward, and weights on the
    host are tried only where no plan without them fits, and both together where neither does. Raises PlanError, with
    the bytes, where no choice fits, and for weights that are to wait on the host and cannot.
    """
    needs = MemoryNeeds.of(config, home, plan, settings, machine=machine)
    return choose_fastest_memory(needs, budget, fixed or FixedMemory())


def choose_fastest_memory(needs: MemoryNeeds, budget: MemoryBudget, fixed: FixedMemory) -> MemoryPlan:
    """Choose as `choose_memory` does, and with its errors, for needs that were counted already. Choices are tried in
    the order of the least seconds that they may add, until the next cannot beat the best that fits.
    """
    if fixed.offload_weights and (reason := needs.places[0].reason_for_weights_on_device):
        raise PlanError(f"train.offload_weights is true, and {reason}; leave it out")
    prices = needs.prices
    # An eighth more: with few layers another choice may need about 1 % less than the leanest.
    roomier = MemoryBudget(device=budget.device * 9 // 8, host=budget.host * 9 // 8)
    for level in _fixed_memory_levels(needs, fixed):
        # `any_choice_fits` counts far fewer than all choices
        possible = [keys for keys in level if any_choice_fits(needs, roomier, keys)]
        choices = [choice for keys in possible for choice in memory_choices(needs, keys)]
        # (least seconds, number of the choice), rising: of equally fast ones the first choice is the best
        bounds = sorted((prices.least_seconds(choice, pair), i) for i, (choice, *pair) in enumerate(choices))
        fastest = None
        best = (math.inf, len(choices))  # seconds, and the number of the choice
        for least_seconds, number in bounds:
            if (least_seconds, number) > best:
                break
            choice = choices[number]
            most = prices.most_slow_layers(*choice, best[0] - least_seconds)
            memory = fit_with_fewest_slow_layers(*choice, budget, most)
            if memory is not None and (candidate := (prices.seconds(memory), number)) < best:
                fastest = memory
                best = candidate
        if fastest is not None:
            return fastest
    raise _too_little_memory(needs, budget, fixed)


def _too_little_memory(needs: MemoryNeeds, budget: MemoryBudget, fixed: FixedMemory) -> PlanError:
    home = needs.places[0].home
    settings = needs.places[0].settings
    leanest = min(
        leanest_plans(needs, fixed),
        key=lambda memory: max(0, memory.device.total - budget.device) + max(0, memory.host.total - budget.host),
    )
    keys = ", ".join(f"{name} = {value!r}" for name, value in vars(fixed).items() if value is not None)
    device = leanest.device.total
    host = leanest.host.total
    packed = "" if settings.trains_all or leanest.device.packed + leanest.host.packed else ', model.frozen = "nf4"'
    halved = leanest.offload_weights and host > budget.host and settings.parameter_bytes > 2
    smaller = ', model.dtype = "bfloat16" (half as many bytes on the host)' if halved else ""
    return PlanError(
        f"the run does not fit {f'with {keys}' if keys else 'under any policy'}: with a slot of {leanest.rows:,} rows "
        f"a rank needs at least {gib_text(device)} ({device:,} bytes) of a GPU that may fill "
        f"{gib_text(budget.device)} ({budget.device:,}), and {gib_text(host)} ({host:,}) of its host's "
        f"{gib_text(budget.host)} ({budget.host:,}); use more than {len(home.ranks)} ranks, fewer rows a slot "
        f"(context.max_tokens_per_slot){packed}{smaller}, or a higher parallel.tp"
    )


def _fixed_memory_levels(needs: MemoryNeeds, fixed: FixedMemory) -> Iterator[list[FixedMemory]]:
    """First those without segments and without weights on the host, then those with one of both, then with both. A
    level is a list of `fixed` with these two filled in."""
    segments = _segment_sizes_to_try(fixed)
    weights = _weight_places_to_try(needs, fixed)
    for level in range(len(segments) + len(weights) - 1):
        yield [
            replace(fixed, segment_layers=size, offload_weights=on_host)
            for size in segments
            for on_host in weights
            if segments.index(size) + weights.index(on_host) == level
        ]


def _segment_sizes_to_try(fixed: FixedMemory) -> list[int]:
    """None first; where layers must keep all, only none."""
    if fixed.segment_layers is not None:
        return [fixed.segment_layers]
    return [0, SEGMENT_LAYERS] if fixed.activation_checkpointing != "none" else [0]


def _weight_places_to_try(needs: MemoryNeeds, fixed: FixedMemory) -> list[bool]:
    """On the device (False), then, where that is possible, on the host (True). Trained weights take the optimizer's
    states along."""
    place = needs.places[0]
    if fixed.offload_weights is not None:
        return [fixed.offload_weights]
    weights_stay = place.reason_for_weights_on_device or not place.settings.gpu
    states_stay = place.settings.trains_all and fixed.offload_optimizer_states is False
    return [False] if weights_stay or states_stay or fixed.reshard_after_forward is False else [False, True]


def memory_choices(
    needs: MemoryNeeds, fixed: FixedMemory
) -> Iterator[tuple[MemoryNeeds, CheckpointPolicy, CheckpointPolicy]]:
    """Yield the choices in order: the needs under each setting, with each pair of a slower policy and a faster or
    equal one. "exchanged" equals "selective" where no load exchanges heads, and is left out.
    """
    exchanges = any(load.exchanged_rows for load in needs.loads)
    words: list[CheckpointPolicy] = [word for word in fixed.checkpoint_policies if exchanges or word != "exchanged"]
    for settings in _settings_to_try(needs, fixed):
        changed = needs.with_settings(settings)
        for fast, slow in combinations_with_replacement(words, 2):
            yield changed, slow, fast


def _settings_to_try(needs: MemoryNeeds, fixed: FixedMemory) -> list[MemorySettings]:
    """The fastest first, and only where a value changes anything."""
    place = needs.places[0]
    settings = place.settings
    tiles_open = fixed.mlp_tile_tokens is None
    tiles = [fixed.mlp_tile_tokens or 0]
    if tiles_open and place.read.family.experts_interface:
        rows = max(load.rows for load in needs.loads)
        tiles += [tile_rows for tile_rows in TILE_ROWS if tile_rows < rows]
    states = [False, True] if settings.gpu and settings.state_numbers > 0 else [False]
    if fixed.offload_optimizer_states is not None:
        states = [fixed.offload_optimizer_states]
    on_host = [
        (states_move, weights_move)
        for weights_move in _weight_places_to_try(needs, fixed)
        for states_move in ([settings.state_numbers > 0] if weights_move and settings.trains_all else states)
    ]
    return [
        replace(
            settings,
            segment_layers=segments,
            mlp_tile_tokens=tile_rows,
            offload_optimizer_states=states_move,
            offload_weights=weights_move,
            reshard_after_forward=frees,
            sync_each_batch=sums_each,
        )
        for segments, tile_rows, (states_move, weights_move), (frees, sums_each) in product(
            _segment_sizes_to_try(fixed), tiles, on_host, _sharding_to_try(needs, fixed)
        )
        if frees or not weights_move  # weights that wait on the host are not kept whole
    ]


def _sharding_to_try(needs: MemoryNeeds, fixed: FixedMemory) -> list[tuple[bool, bool]]:
    """(freed after each pass, summed in each micro-batch), the fastest first. Gradients that are summed once keep
    their weights whole too, so that these are gathered once."""
    place = needs.places[0]
    choices = [(True, True)]
    if place.settings.shard_parameters and not place.always_whole:
        choices = [(False, True), (True, True)]
        # Of one micro-batch gradients are summed once in any case.
        if place.micro_batches != 1:
            choices.insert(0, (False, False))
    if fixed.reshard_after_forward is not None:
        choices = [(fixed.reshard_after_forward, sums_each) for _, sums_each in choices]
    if fixed.sync_each_batch is not None:
        choices = [(frees, fixed.sync_each_batch) for frees, _ in choices]
    return [*dict.fromkeys((frees, sums_each) for frees, sums_each in choices if sums_each or not frees)]


def _leanest_choices(
    needs: MemoryNeeds, fixed: FixedMemory
) -> list[tuple[MemoryNeeds, CheckpointPolicy, CheckpointPolicy]]:
    """With the policies that keep least, with what is sharded and not fixed gathered and summed each time, and the
    smallest tiles. In a model of few layers another choice may need about 1 % less."""
    # These are the last policy of all, and the last of those that are not on the host.
    policies = fixed.checkpoint_policies
    leanest_words = {policies[-1], *[word for word in policies if "+" not in word][-1:]}
    words: list[CheckpointPolicy] = [word for word in policies if word in leanest_words]
    each_time = replace(
        fixed,
        reshard_after_forward=fixed.reshard_after_forward is not False,
        sync_each_batch=fixed.sync_each_batch is not False,
    )
    settings = _settings_to_try(needs, each_time)
    tile_rows = {one.segment_layers: one.mlp_tile_tokens for one in settings}  # the last ones, which are the fewest
    leanest_settings = [one for one in settings if one.mlp_tile_tokens == tile_rows[one.segment_layers]]
    return [
        (changed, slow, fast)
        for changed in map(needs.with_settings, leanest_settings)
        for fast, slow in combinations_with_replacement(words, 2)
    ]


def any_choice_fits(needs: MemoryNeeds, budget: MemoryBudget, fixed: FixedMemory) -> bool:
    """Return whether a plan of memory fits under these keys, by the leanest choices alone."""
    return any(
        fit_with_fewest_slow_layers(*choice, budget) is not None for choice in _leanest_choices(needs, fixed)
    )


def leanest_plans(needs: MemoryNeeds, fixed: FixedMemory) -> Iterator[MemoryPlan]:
    """Yield the plans in which layers keep as little as the fixed keys allow, the least of a GPU first."""
    for choice, slow, fast in reversed(_leanest_choices(needs, fixed)):
        if slow == fast:
            yield choice.under(slow)


def fit_with_fewest_slow_layers(
    needs: MemoryNeeds,
    slow: CheckpointPolicy,
    fast: CheckpointPolicy,
    budget: MemoryBudget,
    most: int = sys.maxsize,
) -> MemoryPlan | None:
    """Return the plan that fits with the fewest layers of the slower policy in each stage, at least 1 and at most
    `most`, if the policies differ; if they are the same, the plan of all layers under it. None if it does not fit
    device and host.

    More such layers take less of the device, and of the host too unless only the slower policy keeps tensors there;
    then the fewest that fit the device take least of the host. So halving finds the fewest.
    """
    low = high = max(len(place.stage.layers) for place in needs.places)
    if slow != fast:
        low = 1
        high = max(1, min(high, most))
    host_rises = "+" in slow and "+" not in fast
    search_budget = replace(budget, host=sys.maxsize) if host_rises else budget

    def fits(count: int) -> bool:
        return needs.policies_fit(needs.policies_of_layers(slow, count, fast), search_budget)

    if not fits(high):
        return None
    while low < high:
        count = (low + high) // 2
        low, high = (low, count) if fits(count) else (count + 1, high)
    memory = needs.under(needs.policies_of_layers(slow, low, fast))
    return memory if memory.fits(budget) else None
