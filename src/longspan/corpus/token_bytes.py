"""How many bytes of text each token id stands for, by which a loss per token becomes one per byte."""

import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# sentencepiece writes this for a space.
_SPACE = "\u2581"


def token_bytes(engine: Tokenizer, rows: int = 0) -> npt.NDArray[np.int64] | None:
    """Count the UTF-8 bytes of each token id (V,); None for a kind of vocabulary whose bytes are not known.

    V is the number of ids, or of `rows` of the model's embedding if that is larger. With these counts a loss per token
    becomes one per byte of text. Bytes are known in byte-level vocabularies (GPT-2's alphabet of bytes), and in those
    that write a space as sentencepiece does. Special tokens, and ids without a token, count 0. If the tokenizer changes
    a text, the bytes of the changed text are counted.
    """
    settings: dict[str, Any] = json.loads(engine.to_str())
    kinds = set(_component_types(settings.get("decoder"))) | set(_component_types(settings.get("pre_tokenizer")))
    byte_level = "ByteLevel" in kinds
    if not byte_level and _SPACE not in json.dumps(settings.get("decoder"), ensure_ascii=False):
        return None
    vocabulary = engine.get_vocab(with_added_tokens=True)
    added = engine.get_added_tokens_decoder()
    counts = np.zeros(max(rows, max(vocabulary.values(), default=-1) + 1), dtype=np.int64)
    for token, i in vocabulary.items():
        if not byte_level and _BYTE.fullmatch(token):  # a byte as a fallback, as <0x0A>
            counts[i] = 1
        elif i in added:
            counts[i] = 0 if added[i].special else len(token.encode())
        else:
            # Each character of GPT-2's alphabet is a byte.
            counts[i] = len(token) if byte_level else len(token.replace(_SPACE, " ").encode())
    return counts


def _component_types(settings: Any) -> list[str]:
    if not isinstance(settings, dict):
        return []
    parts = [part for values in settings.values() if isinstance(values, list) for part in values]
    return [str(settings.get("type")), *(kind for part in parts for kind in _component_types(part))]
