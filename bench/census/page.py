"""docs/models.md, made from the record of the census and the table of kernels, and from nothing else."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from bench.census.images import image_section
from bench.census.record import counts, earlier_text, popular, way_status

from longspan.attention import KERNELS, AttendCall, Mask

COMMAND = "python bench/census.py --docs docs/models.md"
POPULAR = popular("text")
_INTRO = """# Models

This page lists which of transformers' causal language models longspan runs. A census ran a small copy of every class
of transformers' registry in float64 under FSDP2 at degrees 2 and 3, with `p2p` and `all_gather`, in several
micro-batches and with full recomputation. It compared loss and every gradient with the stock model, which saw the same
documents one by one in one process. Exact means a relative error of at most 1e-12, or what rounding does to an
ill-conditioned copy ([doctor](doctor.md)). A model that is not exact is refused by `prepare`, or before its first step,
with the reason. `longspan doctor --model FOLDER` makes this comparison for your own model, on your machine.

{figures} `{command}` makes this page from [the record](../bench/records/census.json)
([as a table](../bench/records/census.md)), which `python bench/census.py --out bench/records/census.json` makes.

## Exact

"Also" names configurations that the census ran beside the defaults of the class. `tp`, `pp` and `ep` say whether homes
with two tensor-parallel ranks, two stages or two expert-parallel ranks are exact too, and "routers" whether the balance
and z losses of routers are; a dash means that the class has no experts. `tp` is for the class's default configuration:
`phi` with `qk_layernorm` is refused under `tp`. "Kernel" is the first of the
[table of kernels](attention.md#kernels) that takes several documents at these head sizes on a GPU in bfloat16, for each
kind of layer; if `fa4` is not installed, the next one runs.

"""
_REFUSED = """
## Refused

What the reasons mean, and what you can do:

"""
_NOT_BUILT = """
## Not built

The census could not make or run a small copy of these. With a real folder `longspan doctor --model FOLDER` may do so.

| class | what was said |
| --- | --- |
"""
# What a message says, what it is in a reader's words, and what to do.
REASONS: tuple[tuple[str, str, str], ...] = (
    (
        r"linear_attention|type 'conv'|'mamba|conv1d|\.conv |'hybrid'|recurrent",
        "recurrent",
        "Layers that mix rows by a recurrence or a convolution without a scan here (Mamba 1, RG-LRU, MiniMax's "
        "linear attention) need their state from the rows before, which other ranks hold. Gated delta nets, "
        "Kimi's delta attention, Mamba 2 and short convolutions are exact ([hybrids](hybrid.md)): use a model of "
        "those, or one whose layers are all attention.",
    ),
    (
        r"indexed_attention|compressed|_sparse'",
        "chosen keys",
        "Its rows choose keys, pools or blocks of keys, or entries, in a way that is not known. Use a model that "
        "chooses [as these do](attention.md#chosen-keys), or an earlier one of its family.",
    ),
    (
        r"cross.?attention|encoder_attn|cross_attn",
        "encoder",
        "Attention to an encoder's output is not supported. Use a decoder without an encoder.",
    ),
    (
        r"bypass(es)? transformers' AttentionInterface",
        "own attention",
        "It computes attention in its own code, where longspan cannot take its place. Use a family that calls "
        "transformers' AttentionInterface.",
    ),
    (
        r"parameters beside its base model|cannot be cut after its base model",
        "own head",
        "Its output is not a function of the last hidden states and the output embedding alone. Use a causal language "
        "model whose head is one matrix.",
    ),
    (r"not causal", "not causal", "Its attention sees later tokens. Use a causal configuration."),
)


def page(record: Mapping[str, Any], of_images: Mapping[str, Any]) -> str:
    models: Mapping[str, Any] = record["models"]
    classes = counts(record, variants=False)
    figures = (
        f"Of {classes.total()} classes of transformers {record['versions'].get('transformers', '')}, "
        f"{classes['exact']} are exact and {classes['refused']} refused; "
        f"{classes['not built']} could not be built by the census, "
        f"{classes['wrong'] + classes['crashed']} are wrong or failed.{earlier_text(record)}"
    )
    text = _INTRO.format(figures=figures, command=COMMAND)
    text += "| class | models | also | kernel | tp | pp | ep | routers |\n" + "| --- " * 8 + "|\n"
    text += "".join(f"| {' | '.join(_exact(name, row, models))} |\n" for name, row in _sorted(models, "exact"))
    text += _REFUSED + "".join(f"- **{name}**: {words}\n" for _, name, words in REASONS)
    text += "\n| class | models | reason |\n| --- | --- | --- |\n"
    for name, row in [*_sorted(models, "refused"), *_sorted(models, "wrong"), *_sorted(models, "crashed")]:
        text += f"| `{name}` | {POPULAR.get(name, '')} | {_why(row)} |\n"
    left = "".join(f"| `{name}` | {_cell(row['message'], 160)} |\n" for name, row in _sorted(models, "not built"))
    return text + _NOT_BUILT + left + image_section(of_images)


def _sorted(models: Mapping[str, Any], status: str) -> list[tuple[str, Any]]:
    """Models of a status by name; variants stand in their class's row where both are exact."""
    rows = [(name, row) for name, row in models.items() if row["status"] == status]
    return sorted((n, r) for n, r in rows if "+" not in n or models.get(n.partition("+")[0], r)["status"] != status)


def _exact(name: str, row: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[str]:
    also = [other.partition("+")[2] for other in models if other.startswith(name + "+")]
    exact = [suffix for suffix in also if models[f"{name}+{suffix}"]["status"] == "exact"]
    yield f"`{name}`"
    yield POPULAR.get(name, "")
    yield ", ".join(exact).replace("_", " ")
    yield ", ".join(dict.fromkeys(kernel_of(kind) for kind in row["heads"]))
    experts = "ep 2" in row["ways"]
    for way in ("tp 2", "pp 2", "ep 2", "router losses"):
        needs_experts = way in ("ep 2", "router losses")
        status = way_status(row, way)
        yield "–" if needs_experts and not experts else {"exact": "yes", "refused": "no"}.get(status, status)


def kernel_of(kind: Mapping[str, Any]) -> str:
    """The first kernel that takes several documents of this kind of layer on a GPU, and its head sizes. The table alone
    decides: this machine need not have a GPU.
    """
    query = kind["query"]
    value = kind["value"]
    window = 1 if kind["window"] else None
    softcap = 1.0 if kind["softcap"] else None
    gpu = torch.device("cuda")
    mask = Mask(window=window)
    chosen = {name: kind.get(name, False) for name in ("indexed", "latents")} | {
        "block_size": kind.get("block_size", 1)
    }
    call = AttendCall(1, 1, query, value, torch.bfloat16, gpu, mask, softcap=softcap, **chosen)
    known = [
        replace(kernel, unsupported_reason=lambda device: "") for kernel in KERNELS if not kernel.one_document_only
    ]
    name = next(kernel.name for kernel in known if not kernel.unsupported_call_reason(call))
    sizes = str(query) if query == value else f"{query}/{value}"
    return f"`{name}` ({sizes})"


def _why(row: Mapping[str, Any]) -> str:
    if row["status"] in ("wrong", "crashed"):
        return f"**{row['status']}**: {_cell(row['message'], 160)}"
    for pattern, name, _ in REASONS:
        if re.search(pattern, row["message"]):
            return name
    said = re.sub(r"^\w+ cannot run exactly over a sharded sequence: |^\w+: ", "", row["message"])
    return _cell(said, 240)


def _cell(text: str, most: int) -> str:
    words = " ".join(text.split()).replace("|", "\\|")
    return words if len(words) <= most else words[:most].rsplit(" ", 1)[0] + " …"
