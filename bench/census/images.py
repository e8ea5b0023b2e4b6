"""The census of classes from images and text to text: what is run of each, the record as text, and the page's section.

A small copy sees documents of 0 to 3 images, packed, beside the stock model that sees them one by one.
"""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.census.record import cell, counted, counts, earlier_text, how
from bench.census.run import Row, as_such, said
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from longspan.bench.benches import origin_text
from longspan.doctor.cases import Case
from longspan.doctor.proof import prove
from longspan.model.exactness.small_copies import shrink_configuration

WAYS = {"tp 2": Case(tp=2, encoder=1), "pp 2": Case(pp=2, encoder=1), "encoder tp 2": Case(cp=2, encoder=2)}
_BASIC = (Case(cp=2, cp_comm_type="all_gather", encoder=1), Case(cp=2, plan="several", recompute="full", encoder=1))
TEXT_ALONE = "text alone"
COMMAND = "python bench/census.py --classes image-text-to-text --out bench/records/census-images.json"
POPULAR = {
    "aya_vision": "Aya Vision",
    "cohere2_vision": "Command A Vision",
    "gemma3": "Gemma 3 4B, 12B, 27B",
    "gemma4": "Gemma 4",
    "glm4v": "GLM-4.1V",
    "glm4v_moe": "GLM-4.5V",
    "glm46v": "GLM-4.6V",
    "glm_ocr": "GLM-OCR",
    "got_ocr2": "GOT-OCR 2",
    "hyperclovax_vision_v2": "HyperCLOVA X",
    "idefics2": "Idefics2",
    "idefics3": "Idefics3, Granite Docling 258M",
    "internvl": "InternVL 3",
    "kimi_k25": "Kimi K2.5",
    "lfm2_vl": "LFM2-VL",
    "lighton_ocr": "LightOnOCR",
    "llama4": "Llama 4 Scout, Maverick",
    "llava": "LLaVA 1.5, Pixtral",
    "llava_next": "LLaVA-NeXT",
    "llava_onevision": "LLaVA-OneVision",
    "mistral3": "Mistral Small 3.1, Magistral",
    "mllama": "Llama 3.2 Vision",
    "paligemma": "PaliGemma 1, 2",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_vl": "Qwen2-VL",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5 MoE",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL 30B-A3B, 235B-A22B",
    "smolvlm": "SmolVLM, SmolVLM2",
}


def image_names() -> list[str]:
    return list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def image_row_of(name: str) -> Row:
    began = time.perf_counter()
    made = str(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name])
    row: Row = {"class": made, "status": "not built", "message": "", "ways": {}}
    try:
        small = shrink_configuration(CONFIG_MAPPING[name](), images=True)
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


def image_text(record: Mapping[str, Any]) -> str:
    models: dict[str, Any] = dict(record["models"])
    exact = {name: row for name, row in models.items() if row["status"] == "exact"}
    others = {name: row for name, row in models.items() if row["status"] != "exact"}
    lines = [
        "# Census of transformers' classes from images and text to text",
        "",
        origin_text(dict(record)),
        "",
        f"Classes of the registry: {counted(counts(record, variants=False))}. "
        f"{sum(row['seconds'] for row in models.values()) / 60:.0f} minutes of one process with its "
        f"ranks.{earlier_text(record)} Made at "
        f"{', '.join(sorted({row['commit'] for row in models.values()}))}.",
        "",
        "Each is a small copy (`longspan.model.exactness.small_copies`) with random weights in float64 on two ranks, "
        "with documents of 0 to 3 images, beside the stock model that sees them one by one in one process; FSDP2 of "
        "the language model and of tower and projector, all_gather at cp 2, several micro-batches under p2p with full "
        "recomputation. Errors are relative, of the loss and of the worst gradient.",
        "",
        f"| exact | loss | gradients | {' | '.join(WAYS)} | seconds |",
        "| --- " * (4 + len(WAYS)) + "|",
        *(_exact_line(name, row) for name, row in exact.items()),
        "",
        "| not exact | | text alone | what was said |",
        "| --- | --- | --- | --- |",
        *(f"| {n} | {r['status']} | {_way(r, TEXT_ALONE)} | {cell(how(r))} |" for n, r in others.items()),
        "",
        "Ways of exact models that are not exact:",
        "",
    ]
    for name, row in exact.items():
        other = {way: it for way, it in row["ways"].items() if it["status"] != "exact"}
        lines += [f"- {name}, {way}: {it['status']}, {cell(how(it))}" for way, it in other.items()]
    return "\n".join(lines) + "\n"


def _exact_line(name: str, row: Mapping[str, Any]) -> str:
    errors = [f"{row[kind]:.0e}" for kind in ("loss_error", "gradient_error")]
    return f"| {' | '.join([name, *errors, *(_way(row, way) for way in WAYS), format(row['seconds'], '.0f')])} |"


def _way(row: Mapping[str, Any], way: str) -> str:
    return row["ways"].get(way, {}).get("status", "")


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
        f"| `{name}` | {POPULAR.get(name, '')} | {' | '.join(_YES.get(_way(row, way), '') for way in WAYS)} |\n"
        for name, row in _of(models, "exact")
    )
    text += _NOT_EXACT
    for status in ("wrong", "crashed", "refused", "not built"):
        for name, row in _of(models, status):
            alone = _YES.get(_way(row, TEXT_ALONE), "–")
            text += f"| `{name}` | {POPULAR.get(name, '')} | {alone} | {_why(row)} |\n"
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


def _why(row: Mapping[str, Any]) -> str:
    return cell(_AROUND.sub("", how(row)), 240)
