"""The pictures of concepts and of the architecture: python docs/site/pictures.py [FOLDER], by default docs/pictures.

slots.svg, types.svg, hierarchy.svg and families.svg are drawn here, rooms.svg from the layers of pyproject.toml, and
plan.svg by `longspan plan --plot`, with the words of PLAN. Every picture has colours for light and for dark pages.
"""

import sys
import tomllib
from html import escape
from pathlib import Path

from longspan.cli.main import main as longspan
from longspan.layout import Layout

PLAN = "plan --distribution lognorm --slots 32 --tokens 1048576 --seed 1 --machine h100 --max-tokens-per-slot 8192"
STYLE = """svg.drawn{--ink:#1d2126;--soft:#5d6670;--line:#b9bfc6;--box:#f3f3ef;
--a:#2f6fb3;--b:#c2571a;--c:#2c7f4f;--d:#8e4585;--on:#ffffff}
@media (prefers-color-scheme: dark){svg.drawn{--ink:#e8eaed;--soft:#a5aeb8;--line:#525b66;--box:#232a32;
--a:#6aaeff;--b:#ffa26b;--c:#63c98f;--d:#dd9bd4;--on:#14171b}}
svg.drawn text{fill:var(--ink);font-family:system-ui,sans-serif;font-size:13px}
svg.drawn text.soft{fill:var(--soft)}svg.drawn text.title{font-weight:600;font-size:15px}
svg.drawn text.on{fill:var(--on);font-weight:600}svg.drawn .box{fill:var(--box);stroke:var(--line)}
svg.drawn .arrow{stroke:var(--soft);stroke-width:1.6;fill:none;marker-end:url(#tip)}
svg.drawn .wide{stroke-width:4;marker-end:none}svg.drawn .tip{fill:var(--soft)}
svg.drawn .dashed{fill:none;stroke:var(--soft);stroke-dasharray:5 4}"""
COLORS = ("a", "b", "c", "d")
STEP = {
    "plan": "document lengths → Plan: micro-batches of groups",
    "comm": "bind → SequenceShard: this rank's rows and groups",
    "train": "run_step: check, read, passes, reduce, clip, update",
    "model": "transformers' model, prepared: its attention calls attend",
    "attention": "attend: p2p, all_gather, a2a or a2a+p2p over a kernel",
}


class Picture:
    """Shapes that are added one after another, in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" viewBox="0 0 {width} {height}" role="img">'
            f"<title>{escape(title)}</title><style>{STYLE}</style>"
            '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="6" refY="3.5" orient="auto">'
            '<path class="tip" d="M0 0L7 3.5L0 7z"/></marker></defs>'
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, color: str = "", words: str = "") -> None:
        look = f'style="fill:var(--{color})"' if color else 'class="box"'
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" {look}/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 4.5, words, "on" if color else "", "middle")

    def dashed(self, x: float, y: float, width: float, height: float) -> None:
        self.parts.append(f'<rect class="dashed" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>')

    def arrow(self, path: str, wide: bool = False) -> None:
        self.parts.append(f'<path class="arrow{" wide" if wide else ""}" d="{path}"/>')

    def svg(self) -> str:
        return "".join(self.parts) + "</svg>\n"


def slots() -> str:
    """16 ranks as one plane of 16 slots, and as 4 slots of tp 2 × pp 2."""
    picture = Picture(1000, 350, "The same 16 GPUs as 16 slots, and as 4 slots")
    for left, home in ((20, Layout(ranks=16)), (520, Layout(ranks=16, tp=2, pp=2))):
        words = f"Layout(ranks=16{f', tp={home.tp}, pp={home.pp}' if home.tp > 1 else ''})"
        picture.text(left, 24, f"{words}: {home.slots} slots", "title")
        for host in (0, 1):
            top = 44 + host * 144
            picture.box(left, top, 460, 132)
            picture.text(left + 10, top + 20, f"host {host}", "soft")
            for rank in range(host * 8, host * 8 + 8):
                place = home.coordinates(rank)
                x, y = left + 12 + (rank % 8) * 55, top + 32
                picture.box(x, y, 50, 44, COLORS[place.slot % 4], str(rank))
                picture.text(x + 25, y + 62, f"slot {place.slot}", anchor="middle")
                if home.tp > 1:
                    picture.text(x + 25, y + 78, f"tp {place.tp}", "soft", "middle")
                    picture.text(x + 25, y + 94, f"pp {place.pp}", "soft", "middle")
    picture.text(20, 340, "A slot is what a plan gives documents to. Colours repeat after four slots.", "soft")
    return picture.svg()


def types() -> str:
    """What each of the four types sends, for a group of four members."""
    picture = Picture(1000, 560, "What the four communication types send")
    panels = (
        (20, 20, "p2p: a ring", "Blocks of keys and values travel from member to member; queries stay."),
        (520, 20, "all_gather", "Every member receives the keys and values of all."),
        (20, 300, "a2a: heads for rows", "Each member gets all rows for a share of the heads; outputs go back."),
        (520, 300, "a2a+p2p: both", "a2a between neighbours, a ring of these neighbourhoods."),
    )
    for left, top, title, words in panels:
        picture.text(left, top + 8, title, "title")
        picture.text(left, top + 28, words, "soft")
    for member, color in enumerate(COLORS):
        _ring_member(picture, 20 + member * 118, 70, member, color)
        _gather_member(picture, 520 + member * 118, 70, member)
        _exchange_member(picture, 20 + member * 118, 350, member, color)
        _both_member(picture, 520 + member * 118, 350, member, color)
    picture.arrow("M 420 205 C 420 245, 70 245, 70 210")
    for pair in (0, 1):
        picture.dashed(514 + pair * 236, 344, 224, 112)
    picture.arrow("M 640 458 C 640 505, 840 505, 840 460")
    picture.arrow("M 860 458 C 860 525, 620 525, 620 460")
    return picture.svg()


def _ring_member(picture: Picture, x: float, y: float, member: int, color: str) -> None:
    picture.box(x, y, 100, 44, color, f"rows {member}")
    picture.box(x + 18, y + 90, 64, 30, color, f"K V {member}")
    picture.arrow(f"M {x + 50} {y + 48} L {x + 50} {y + 84}")
    if member < 3:
        picture.arrow(f"M {x + 86} {y + 105} L {x + 130} {y + 105}")


def _gather_member(picture: Picture, x: float, y: float, member: int) -> None:
    picture.box(x, y, 100, 44, COLORS[member], f"rows {member}")
    picture.arrow(f"M {x + 50} {y + 84} L {x + 50} {y + 50}")
    for other, color in enumerate(COLORS):
        picture.box(x + other * 25, y + 90, 24, 30, color, str(other))
    picture.text(x + 50, y + 140, "K V of all", "soft", "middle")


def _exchange_member(picture: Picture, x: float, y: float, member: int, color: str) -> None:
    for head in range(4):
        picture.box(x + head * 25, y, 24, 44, color, f"h{head}")
        picture.box(x, y + 92 + head * 20, 100, 18, COLORS[head], f"rows {head}, h{member}")
    picture.arrow(f"M {x + 50} {y + 48} L {x + 50} {y + 86}")


def _both_member(picture: Picture, x: float, y: float, member: int, color: str) -> None:
    for half in (0, 1):
        picture.box(x + half * 50, y, 49, 30, color, ("h0 h1", "h2 h3")[half])
        rows = member // 2 * 2 + half
        picture.box(x, y + 62 + half * 20, 100, 18, COLORS[rows], f"rows {rows}, {('h0-1', 'h2-3')[member % 2]}")
    picture.arrow(f"M {x + 50} {y + 33} L {x + 50} {y + 57}")


def hierarchy() -> str:
    """A document over two hosts of four GPUs: which bytes cross the network under each type."""
    picture = Picture(1000, 300, "a2a+p2p (4, 2): exchanges inside hosts, a ring between them")
    picture.text(20, 24, "One document on 8 GPUs of 2 hosts: hierarchical_context_parallel_sizes = (4, 2)", "title")
    for host in (0, 1):
        left = 20 + host * 540
        picture.box(left, 50, 420, 150)
        picture.text(left + 12, 72, f"host {host}", "soft")
        for member in range(4):
            x = left + 14 + member * 100
            picture.box(x, 86, 92, 40, COLORS[member], f"GPU {host * 4 + member}")
            picture.text(x + 46, 190, f"heads {member * 8}-{member * 8 + 7}", "soft", "middle")
        picture.arrow(f"M {left + 20} 150 L {left + 400} 150", wide=True)
        picture.text(left + 210, 170, "a2a: 3/4 of q, k, v and out, over fast links", anchor="middle")
    picture.arrow("M 444 112 L 556 112")
    picture.arrow("M 556 132 L 444 132")
    picture.text(500, 92, "p2p", anchor="middle")
    picture.text(500, 156, "keys, values", "soft", "middle")
    picture.text(
        20,
        234,
        "Each GPU holds all rows of its host for a quarter of the heads, and sends their keys and values across.",
    )
    picture.text(
        20,
        256,
        "So 4 blocks cross the network each way, over 4 links at once. In a ring of 8 it would be 7, over one link.",
    )
    picture.text(
        20, 284, "Sizes (8, 1) are a2a, sizes (1, 8) are p2p. auto chooses sizes for each group, by price.", "soft"
    )
    return picture.svg()


def families() -> str:
    """Four answers to one prompt: as separate documents, as a prefix tree, and which rows of it see which keys."""
    picture = Picture(1000, 300, "Four answers to one prompt, as separate documents and as a prefix tree")
    picture.text(20, 24, "separate documents", "title")
    picture.text(370, 24, "a prefix tree: the prompt once", "title")
    picture.text(730, 24, "rows (down) and keys", "title")
    picture.box(370, 110, 150, 34, "a", "prompt")
    for answer, color in enumerate(("b", "c", "d", "b")):
        y = 44 + answer * 56
        picture.box(20, y, 210, 34, "a", "prompt")
        picture.box(232, y, 88, 34, color, f"answer {answer}")
        picture.box(590, y, 88, 34, color, f"answer {answer}")
        picture.arrow(f"M 522 127 L 584 {y + 17}")
        picture.box(840 + answer * 34, 154 + answer * 24, 32, 22, color)
    picture.box(730, 44, 108, 108, "a", "prompt")
    picture.box(730, 154, 108, 94, "a", "no mask")
    picture.text(20, 284, "Each document sees its own prompt.", "soft")
    picture.text(370, 284, "The last token of the prompt heads each answer.", "soft")
    picture.text(730, 284, "One launch for all answers.", "soft")
    return picture.svg()


def rooms() -> str:
    """The layers of import-linter from top to bottom, and beside them what a step passes."""
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    picture = Picture(1000, 40 + 26 * len(layers), "The rooms of longspan, and the way of a step through them")
    picture.text(20, 24, "Rooms: each imports from those below", "title")
    picture.text(570, 24, "A step", "title")
    for row, layer in enumerate(layers):
        names = layer.split(" | ")
        width = 524 / len(names)
        for column, name in enumerate(names):
            color = "a" if name in STEP else ""
            picture.box(20 + column * width, 36 + row * 26, width - 4, 22, color, name)
    for number, (room, words) in enumerate(STEP.items()):
        top = 44 + number * 88
        picture.box(570, top, 410, 56)
        picture.text(584, top + 23, f"{number + 1}. {room}", "title")
        picture.text(584, top + 43, words, "soft")
        if number:
            picture.arrow(f"M 775 {top - 32} L 775 {top}")
    return picture.svg()


def draw(folder: Path) -> None:
    """Write all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for drawing in (slots, types, hierarchy, families, rooms):
        (folder / f"{drawing.__name__}.svg").write_text(drawing(), encoding="utf-8")
    longspan([*PLAN.split(), "--json", "--plot", str(folder / "plan.svg")])


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "pictures")
