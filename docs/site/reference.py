"""The pages of docs/reference/, made from the public names: python docs/site/reference.py

Each public name is shown once, on the page of its subject; a namespace that has it too names it and links there. What a
page says of a name is its docstring, which mkdocstrings reads from the source. tests/test_site.py compares the pages.
"""

from importlib import import_module
from pathlib import Path

PAGES = {
    "plan": (
        "Layouts and plans",
        "the home of a run, plans, the planners, and what plans cost. None of it imports torch",
        ("longspan.layout", "longspan.plan"),
    ),
    "train": (
        "Steps, losses and evaluation",
        "what runs a plan: steps, losses of your own, evaluation, optimizers and checkpoints",
        ("longspan.train", "longspan.mtp"),
    ),
    "model": (
        "Models",
        "how a Hugging Face model comes under a home, and how its weights are saved",
        ("longspan.model",),
    ),
    "multimodal": (
        "Images, videos and encoders",
        "models of several modules: encoders, items, and the bridge between layouts",
        ("longspan.multimodal", "longspan.bridge"),
    ),
    "layers": (
        "Attention and state-space layers",
        "exact attention and scans over sequences that several ranks share, for models of your own",
        ("longspan.attention", "longspan.ssm"),
    ),
    "trainers": ("transformers' Trainer and TRL", "Trainers whose processes share long documents", ("longspan.hf",)),
    "tools": (
        "Corpora, proofs and local ranks",
        "rows and tokenizers, the proof that a model is exact here, and ranks for tests",
        ("longspan.corpus", "longspan.doctor", "longspan.testing"),
    ),
    "world": (
        "The package longspan",
        "the names that can be imported from `longspan` itself. Most are shown on the page of their subject",
        ("longspan",),
    ),
    "errors": (
        "Errors",
        "every error that longspan raises for a caller's mistake or a failed run. Messages are in "
        "[what is refused](../limits.md) and in [troubleshooting](../troubleshooting.md)",
        ("longspan.errors",),
    ),
}
FOLDER = Path(__file__).resolve().parents[1] / "reference"


def public_names(namespace: str) -> list[str]:
    """What a namespace offers: its `__all__`, or every error class."""
    module = import_module(namespace)
    if namespace == "longspan.errors":
        return [name for name, value in vars(module).items() if isinstance(value, type)]
    return sorted(module.__all__, key=str.lower)


def pages() -> dict[str, str]:
    """The text of each page by its name."""
    shown: dict[int, tuple[str, str]] = {}  # a value, and the page and the path that show it
    texts = {}
    for page, (title, covers, namespaces) in PAGES.items():
        parts = [f"# {title}\n\nThis page is the reference of {covers}.\n"]
        for namespace in namespaces:
            parts.append(f"## {namespace}\n")
            entries, elsewhere = [], []
            for name in public_names(namespace):
                value = getattr(import_module(namespace), name)
                if id(value) in shown and not isinstance(value, (str, int, float, tuple)):
                    owner, path = shown[id(value)]
                    link = f"#{path}" if owner == page else f"{owner}.md#{path}"
                    elsewhere.append(f"[`{name}`]({link})")
                else:
                    shown[id(value)] = (page, f"{namespace}.{name}")
                    entries.append(f"::: {namespace}.{name}\n")
            if elsewhere:
                parts.append(f"`{namespace}` also has {', '.join(elsewhere)}.\n")
            parts += entries
        texts[page] = "\n".join(parts)
    return texts


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page, text in pages().items():
        (FOLDER / f"{page}.md").write_text(text, encoding="utf-8")
