"""Draws the picture of docs/bridge.md from a plan: who encodes which images, who owns their positions, what travels.

python bench/plans/bridge_picture.py --plot docs/bridge.svg
"""

import argparse
from pathlib import Path

from longspan.layout import Exchange, Layout
from longspan.plan import plan_fixed
from longspan.plan.items.encoding_plan import EncoderPlanning, ModalityPlan, NeededBy, plan_items
from longspan.plan.items.item_table import ItemTable, MediaItem

LENGTHS = (16, 16)
IMAGES = {
    "A": MediaItem(0, ((2, 8),)),
    "B": MediaItem(0, ((9, 11),)),
    "C": MediaItem(1, ((1, 5),)),
    "D": MediaItem(1, ((7, 10),)),
}
COLORS = ("#3b7dd8", "#d07c12", "#3a9d6e", "#b5539a")
INK = "var(--ink)"
PAPER = "var(--paper)"
TEXT_ROW = "var(--row)"
STYLE = """<style>svg{--ink:#222;--paper:#fff;--row:#e6e6e6}
@media (prefers-color-scheme: dark){svg{--ink:#e8eaed;--paper:#1e2129;--row:#3a414b}}</style>"""
HOME = Layout(ranks=4)
# Pixels: between ranks, above the first, of a row, where the language model begins.
ROW = 84
TOP = 96
SIDE = 22
RIGHT = 560


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, required=True)
    parser.parse_args().plot.write_text(picture())


def picture() -> str:
    table = ItemTable(LENGTHS, IMAGES.values())
    (micro_batch,) = plan_fixed(LENGTHS, HOME, cp=2).micro_batches
    needed_by = NeededBy(micro_batches=(micro_batch,), home=HOME)
    plan = plan_items(table, needed_by, {"image": EncoderPlanning(home=HOME)})["image"]
    (wave,) = plan.waves
    exchange = Exchange(wave.have, wave.need)
    parts = [_text(20, 30, "Encoder: each rank a slot, images dealt out by cost", bold=True)]
    parts += [_text(RIGHT, 30, "Language model: two slots share a document (cp 2, zigzag)", bold=True)]
    for rank in HOME.ranks:
        parts += [_text(20, _y(rank) - 10, f"rank {rank}"), _text(RIGHT, _y(rank) - 10, f"rank {rank}")]
        rows = wave.have.rows(rank).tolist()
        parts += [_box(20 + SIDE * i, _y(rank), plan, row) for i, row in enumerate(rows)]
        local, row = plan.needed[rank][0]
        places = dict(zip(local.tolist(), row.tolist(), strict=True))  # rows of images by place
        parts += [_box(RIGHT + SIDE * i, _y(rank), plan, places.get(i)) for i in range(LENGTHS[0] // 2)]
        parts += [_arrow(exchange, rank, to, plan) for to in HOME.ranks if exchange.moves(rank).sends[to]]
    moved = sum(map(exchange.received_rows, HOME.ranks))
    rows = sum(wave.have.counts)
    parts.append(
        _text(20, _y(4) - 22, f"{moved} of {rows} rows travel, each once, to the rank that owns its position; rank 0 "
        "keeps two of its own. Gradients travel the same ways back.")
    )  # fmt: skip
    size = f'viewBox="0 0 1010 {_y(4)}" font-family="system-ui, sans-serif" font-size="13" role="img"'
    title = "<title>Rows of images go from the ranks that encode them to the ranks that own their positions</title>"
    marker = '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
    marker += '<path d="M0 0L7 3L0 6z" fill="#888"/></marker></defs>'
    background = f'{STYLE}<rect width="1010" height="{_y(4)}" fill="{PAPER}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{title}{marker}{background}{"".join(parts)}</svg>\n'


def _y(rank: int) -> int:
    return TOP + ROW * rank


def _text(x: float, y: float, text: str, *, bold: bool = False, anchor: str = "start", fill: str = INK) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}"{weight}>{text}</text>'


def _image(plan: ModalityPlan, row: int) -> int:
    return sum(row >= base for base in plan.rows.base[1:-1].tolist())


def _box(x: float, y: float, plan: ModalityPlan, row: int | None) -> str:
    if row is None:
        return f'<rect x="{x}" y="{y}" width="{SIDE - 2}" height="{SIDE}" fill="{TEXT_ROW}"/>'
    image = _image(plan, row)
    rect = f'<rect x="{x}" y="{y}" width="{SIDE - 2}" height="{SIDE}" fill="{COLORS[image]}"/>'
    return rect + _text(x + SIDE / 2 - 1, y + 16, [*IMAGES][image], anchor="middle", fill="#fff")


def _arrow(exchange: Exchange, rank: int, to: int, plan: ModalityPlan) -> str:
    moves = exchange.moves(rank)
    have = exchange.have.rows(rank).tolist()
    count = moves.sends[to]
    first = have[int(moves.leaves[sum(moves.sends[:to])])]
    start, end = 26 + SIDE * len(have), RIGHT - 10
    y = _y(rank) + SIDE / 2
    bottom = _y(to) + SIDE / 2
    color = COLORS[_image(plan, first)]
    middle = (start + end) / 2
    path = f'<path d="M{start} {y}C{middle} {y} {middle} {bottom} {end} {bottom}" fill="none" stroke="{color}"'
    t = 0.36 if rank < to else 0.2  # of the way along the curve
    x = (1 - t) ** 3 * start + 3 * t * (1 - t) * middle + t**3 * end
    near = ((1 - t) ** 3 + 3 * t * (1 - t) ** 2) * y + (3 * t**2 * (1 - t) + t**3) * bottom
    words = f"{count} rows" if count > 1 else "1 row"
    label = _text(x, near + 4, words, anchor="middle", fill=color)
    label = f'<g stroke="{PAPER}" stroke-width="5" paint-order="stroke">{label}</g>'
    return f'{path} stroke-width="{1 + count / 2}" marker-end="url(#tip)"/>{label}'


if __name__ == "__main__":
    main()
