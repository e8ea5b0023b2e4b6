"""The record of `bench/vision/vision_step.py` as Markdown."""

from collections.abc import Iterator
from typing import Any

from longspan.bench.record import origin_text
from longspan.plain_text import markdown_table

NAMES = ("images a document", "plan", "images are", "step, s", "predicted, s", "tokens/s a GPU", "GiB")
NAMES += ("encoder, s", "of the step", "predicted", "busiest / mean", "predicted", "differs")


def text_of(record: dict[str, Any]) -> str:
    """The record for people who read bench/records."""
    tower = "sharded (FSDP2)" if record["shard_encoder"] else "copied to every rank"
    note = (
        f"Qwen3-VL-8B's widths, {record['depth']} layers of its tower and {record['layers']} of its language model, "
        f"random weights in bfloat16; {record['rows_of_slot']:,} rows of a slot in a micro-batch. Whole steps with an "
        f"optimizer: median of {record['repeats']}, of the slowest rank. The language model is sharded (FSDP2), the "
        f"tower {tower}, its blocks recomputed. *Planned*: images dealt to all ranks by their cost, rows to their "
        "owners; *replicated*: every rank encodes all images of its group's documents. Encoder: until the language "
        "model has its rows, and from its end, exchanges and waiting included, mean of ranks. Busiest: "
        "towers alone. Differs: loss or gradient norm from the first line of the same documents, relative."
    )
    if record["small"]:
        note = "A tiny model in float64 on CPUs: a check of the path, whose times say nothing. " + note
    table = markdown_table(NAMES, [_cells(row, record["ranks"]) for row in record["rows"]])
    return "\n".join(
        ["# Steps with images", "", origin_text(record), "", note, "", table, "", *_against(record["rows"])]
    )


def _cells(row: dict[str, Any], ranks: int) -> tuple[str, ...]:
    seconds, encoder = row["seconds"], row["encoder_seconds"]
    predicted = row["encoder_predicted_seconds"] / row["predicted_seconds"]
    plan = f"{row['plan']}, {row['micro_batches']} x degree {row['widest']}"
    return (
        *(row["documents"], plan, row["encoder"], f"{seconds:.3f}", f"{row['predicted_seconds']:.3f}"),
        *(f"{row['tokens'] / seconds / ranks:,.0f}", f"{row['gib']:.1f}", f"{encoder:.3f}"),
        *(f"{encoder / seconds:.0%}", f"{predicted:.0%}"),
        *(f"{row['encoder_balance']:.2f}", f"{row['encoder_predicted_balance']:.2f}", f"{row['difference']:.1e}"),
    )


def _against(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The replicated encoder's time over the planned one's, of the same documents and plan."""
    planned = {(row["documents"], row["plan"]): row for row in rows if row["encoder"] == "planned"}
    for row in rows:
        ours = planned.get((row["documents"], row["plan"]))
        if row["encoder"] == "replicated" and ours is not None:
            whole, part = (row[name] / ours[name] for name in ("seconds", "encoder_seconds"))
            yield (
                f"- {row['documents']} images a document ({row['images']} images of {row['image_rows']:,} rows in "
                f"{row['tokens']:,} tokens), {row['plan']}: replicated takes {part:.2f} x the encoder's time and "
                f"{whole:.2f} x the step's."
            )
