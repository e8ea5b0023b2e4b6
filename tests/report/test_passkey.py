"""The picture of passkey retrieval: every cell with its number, and nothing outside the sheet."""

from xml.etree import ElementTree

import pytest

from longspan.evaluation.result import PasskeyGrid
from longspan.report.passkey import passkey_picture

SVG = "{http://www.w3.org/2000/svg}"


def grid(lengths: int, depths: int) -> PasskeyGrid:
    cells = tuple(tuple((i + j) % 5 for j in range(depths)) for i in range(lengths))
    losses = tuple(tuple(0.5 for _ in range(depths)) for _ in range(lengths))
    places = tuple(j / max(depths - 1, 1) for j in range(depths))
    return PasskeyGrid(tuple(1024 << i for i in range(lengths)), places, 4, cells, losses, step=300, cp=8)


@pytest.mark.parametrize(("lengths", "depths"), [(1, 1), (3, 5), (12, 11)])
def test_every_cell_has_its_number_inside_the_sheet(lengths: int, depths: int) -> None:
    drawn = grid(lengths, depths)
    root = ElementTree.fromstring(passkey_picture(drawn, name="a <b>"))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    cells = root.findall(f"{SVG}g/{SVG}g")
    numbers = [cell.findtext(f"{SVG}text") for cell in cells]
    assert numbers == [f"{25 * count}%" for row in drawn.retrieved for count in row]
    for cell in cells:
        box = cell.find(f"{SVG}rect")
        assert box is not None
        assert float(box.attrib["x"]) + float(box.attrib["width"]) < width
        assert float(box.attrib["y"]) + float(box.attrib["height"]) < height - 40
    words = [element.text or "" for element in root.iter(f"{SVG}text")]
    retrieved, keys = sum(map(sum, drawn.retrieved)), 4 * lengths * depths
    assert words[0] == f"Passkey retrieval (a <b>): {retrieved} of {keys} keys retrieved"
    assert "After step 300, at cp 8." in words[1]
    assert "100% in every cell is best" in words[1]
    assert f"{1024 << (lengths - 1):,}" in words


def test_numbers_stand_out_from_their_cells() -> None:
    """Contrast as WCAG 2 measures it, at least 4.5 (its level AA), in light and in dark."""
    drawn = PasskeyGrid((512,), tuple(i / 40 for i in range(41)), 40, (tuple(range(41)),), (tuple([0.0] * 41),))
    for cell in ElementTree.fromstring(passkey_picture(drawn)).findall(f"{SVG}g/{SVG}g"):
        box, number = cell.find(f"{SVG}rect"), cell.find(f"{SVG}text")
        assert box is not None
        assert number is not None
        ink = {"on-dark": "#ffffff", "on-light": "#000000"}[number.attrib["class"]]
        low, high = sorted(map(_luminance, (box.attrib["fill"], ink)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (number.text, box.attrib["fill"])


def _luminance(color: str) -> float:
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
