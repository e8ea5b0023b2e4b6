"""What encoding an item takes, by its rows: work that grows with its patches, and attention between them."""

from longspan.errors import PlanError
from longspan.plan.cost.cost import Cost


def encoder_cost(
    weights: int,
    width: int,
    full_layers: int,
    *,
    window_layers: int = 0,
    window: int = 0,
    patches_per_row: int = 1,
    flops_per_second: float = 4e14,
    wave_seconds: float = 2e-3,
) -> Cost:
    """The cost of an encoder whose patches see each other, forward and backward, for `Encoder(cost=…)`.

    `weights` are the parameters that every patch goes through, `width` the query width (heads × head size).
    `full_layers` let all patches of an item see each other, `window_layers` those of windows of `window` patches (an
    encoder of windows alone has a cost that grows with the rows and no more). `patches_per_row` patches are merged into
    one row of the language model (4 for a 2 × 2 merger). Raises PlanError for negative numbers, and for layers with
    windows without a window.

    >>> cost = encoder_cost(600_000_000, 1280, 4, window_layers=28, window=64, patches_per_row=4)
    """
    counts = {"weights": weights, "width": width, "full_layers": full_layers, "window_layers": window_layers}
    if wrong := [name for name, value in counts.items() if value < 0]:
        raise PlanError(f"{wrong[0]} is {counts[wrong[0]]}; give a count of at least 0")
    if window_layers and window < 1:
        raise PlanError(f"{window_layers} layers attend in windows, but window is {window}; give its patches")
    if patches_per_row < 1:
        raise PlanError(f"patches_per_row is {patches_per_row}; give at least 1")
    pair = 14 * width  # FLOPs: 4 forward and 10 backward for each feature of a query and a key
    linear = patches_per_row * (6 * weights + pair * window_layers * window)
    return Cost(
        linear_seconds=linear / flops_per_second,
        attention_seconds=full_layers * pair * patches_per_row**2 / flops_per_second,
        micro_batch_seconds=wave_seconds,
        source="an encoder",
    )
