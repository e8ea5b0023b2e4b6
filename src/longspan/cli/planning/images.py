"""What `plan` says of images: what the tower and projector of a vision-language model take beside the plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longspan.errors import ConfigError, PlanError
from longspan.plan import Cost, Plan
from longspan.plan.cost.model_cost import with_spans
from longspan.plan.items.encoder_shape import EncoderLoad, EncoderShape


@dataclass(frozen=True, kw_only=True)
class ImageFlags:
    """Images of the documents that are planned for."""

    images: str = ""
    """With --model of a vision-language model: images of each document, such as 16x256: 16 images of 256 rows each,
    which are among its tokens. Their encoding is priced, dealt to all slots."""
    max_image_rows: int = 0
    """With --images: rows of images that a slot encodes at once; 0: all."""


def with_images(flags: ImageFlags, model: str, lengths: Sequence[int], cost: Cost) -> Cost:
    """The cost of these documents, where tokens of an image see each other too. Raises ConfigError as below."""
    if not flags.images or not model:
        return cost
    count, rows = _counted(flags.images)
    return with_spans(cost, model, [rows] * (count * len(lengths)), sum(lengths))


def image_notes(flags: ImageFlags, model: str, plan: Plan) -> Iterator[str]:
    """Lines below a plan. Raises ConfigError for images that do not fit, PlanError for a tower without a price."""
    if flags.images and not model:
        raise ConfigError(f"--images {flags.images} needs the model whose tower encodes them; give its --model FOLDER")
    if not flags.images:
        if model and _has_tower(model):
            yield "the model has a tower for images, which is not in these seconds; --images COUNTxROWS adds it"
        return
    count, rows = _counted(flags.images)
    shape = EncoderShape.of(model)
    if short := [n for n in plan.lengths if n < count * rows]:
        raise ConfigError(
            f"--images {flags.images} takes {count * rows:,} tokens of each document, and {len(short)} of "
            f"{len(plan.lengths)} are shorter (the shortest {min(short):,}); give fewer or smaller images"
        )
    images = [[rows] * count] * len(plan.lengths)
    load = EncoderLoad.of(plan, images, shape.cost(), max_rows=flags.max_image_rows or None)
    share = load.seconds / (load.seconds + plan.predicted_seconds)
    yield (
        f"encoder: {count * len(images):,} images of {rows:,} rows dealt to {plan.slots} slots take {load.seconds:.3g} "
        f"s beside the plan's {plan.predicted_seconds:.3g} s on H200s, {share:.0%} of the step; the busiest slot has "
        f"{load.balance:.2f} of the mean"
    )
    yield (
        f"every slot encoding all images of its documents would take {load.replicated_seconds:.3g} s, "
        f"{load.replicated_seconds / load.seconds:.1f} times as long"
    )


def _counted(text: str) -> tuple[int, int]:
    count, _, rows = text.lower().partition("x")
    if not count.isdecimal() or not rows.isdecimal() or not int(count) * int(rows):
        raise ConfigError(f"--images {text!r} is not COUNTxROWS, such as 16x256")
    return int(count), int(rows)


def _has_tower(model: str) -> bool:
    try:
        return bool(EncoderShape.of(model))
    except PlanError:
        return False
