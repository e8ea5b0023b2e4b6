"""The census of classes from images and text to text: what is run of each, the record as text, and the page's section.

A small copy sees documents of 0 to 3 images, packed, beside the stock model that sees them one by one.
"""

import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bench.census.record import as_text, cell, counts, earlier_text, how, popular, way_status
from bench.census.run import Row, as_such, said
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from longspan.doctor.cases import Case
from longspan.doctor.proof import prove
from longspan.doctor.which_model import default_configuration
from longspan.model.exactness.small_copies import shrink_configuration

WAYS = {"tp 2": Case(tp=2, encoder=1), "pp 2": Case(pp=2, encoder=1), "encoder tp 2": Case(cp=2, encoder=2)}
_BASIC = (Case(cp=2, cp_comm_type="all_gather", encoder=1), Case(cp=2, plan="several", recompute="full", encoder=1))
TEXT_ALONE = "text alone"
COMMAND = "python bench/census.py --classes image-text-to-text --out bench/records/census-images.json"
POPULAR = popular("image-text-to-text")


def image_names() -> list[str]:
    return list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def image_row_of(name: str) -> Row:
    began = time.perf_counter()
    made = str(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name])
    row: Row = {"class": made, "status": "not built", "message": "", "ways": {}}
    try:
        small = shrink_configuration(default_configuration(CONFIG_MAPPING[name]), images=True)
    except Exception as error:  # of a configuration class, and of the stock model
        row["message"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return row | {"seconds": round(time.perf_counter() - began, 1)}
    outcomes = prove(small, (*_BASIC, *WAYS.values()), 2)
    row |= as_such(outcomes[: len(_BASIC)])
    ways = dict(zip(WAYS, outcomes[len(_BASIC) :], strict=True)) if row["status"] == "exact" else {}
    if row["status"] == "refused":
        ways = {TEXT_ALONE: prove(small, (Case(cp=2),), 2)[0]}
    row["ways"] = {way: {"status": outcome.status, **said(outcome)} for way, outcome in ways.items()}
    return row | {"seconds": round(time.perf_counter() - began, 1)}


IMAGE_TITLE = "Census of transformers' classes from images and text to text"
IMAGE_ABOUT = (
    "Each is a small copy (`longspan.model.exactness.small_copies`) with random weights in float64 on two ranks, "
    "with documents of 0 to 3 images, beside the stock model that sees them one by one in one process; FSDP2 of "
    "the language model and of tower and projector, all_gather at cp 2, several micro-batches under p2p with full "
    "recomputation. Errors are relative, of the loss and of the worst gradient."
)
image_text = partial(as_text, title=IMAGE_TITLE, about=IMAGE_ABOUT, ways=tuple(WAYS), alone=TEXT_ALONE)


def image_section(record: Mapping[str, Any]) -> str:
    models = record["models"]
    classes = counts(record, variants=False)
    text = _INTRO.format(
        total=classes.total(),
        transformers=record["versions"].get("transformers", ""),
        exact=classes["exact"],
        refused=classes["refused"],
        not_built=classes["not built"],
        failed=classes["wrong"] + classes["crashed"],
        earlier=earlier_text(record),
        command=COMMAND,
    )
    text += "| class | models | tp | pp | encoder tp |\n" + "| --- " * 5 + "|\n"
    text += "".join(
        f"| `{name}` | {POPULAR.get(name, '')} | {' | '.join(_YES.get(way_status(row, way), '') for way in WAYS)} |\n"
        for name, row in _of(models, "exact")
    )
    text += _NOT_EXACT
    for status in ("wrong", "crashed", "refused", "not built"):
        for name, row in _of(models, status):
            alone = _YES.get(way_status(row, TEXT_ALONE), "–")
            text += f"| `{name}` | {POPULAR.get(name, '')} | {alone} | {cell(_AROUND.sub('', how(row)), 240)} |\n"
    return text


_YES = {"exact": "yes", "refused": "no", "wrong": "**wrong**", "crashed": "**crashed**"}
_INTRO = """
## With images

The census also ran a small copy of every class from images and text to text, with packed documents of 0 to 3 images,
and with tower and projector under a home of their own (`prepare(model, world, encoder=…)`,
[vision models](vision-models.md)). It ran them in float64 under FSDP2, at cp 2 under `all_gather`, and in several
micro-batches under `p2p` with full recomputation. It compared loss and every gradient with the stock model, which saw
the documents one by one; exact means a relative error of at most 1e-12.

Of {total} classes of transformers {transformers}, {exact} are exact and {refused} refused; {not_built} could not be
built by the census, {failed} are wrong or failed.{earlier} ([The record](../bench/records/census-images.json),
[as a table](../bench/records/census-images.md), which `{command}` makes.) "tp", "pp" and "encoder tp" say whether two
tensor-parallel ranks or stages of the language model, and two tensor-parallel ranks of tower and projector, are exact
too.

"""
_NOT_EXACT = """
These are not exact with images; "text alone" says whether the class is exact if it is prepared without `encoder=`:

| class | models | text alone | reason |
| --- | --- | --- | --- |
"""


def _of(models: Mapping[str, Any], status: str) -> Sequence[tuple[str, Any]]:
    return sorted((name, row) for name, row in models.items() if row["status"] == status)


_AROUND = re.compile(r"^\w+ (\(\w+\) )?cannot be given images: |; use prepare without encoder= for text alone.*$")
