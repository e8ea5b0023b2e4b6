"""How many bytes of text each token of a vocabulary stands for, which bits per byte are counted by.

A loss per token depends on the tokenizer; per byte of text it can be compared between tokenizers.
"""

import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"  # what sentencepiece writes for a space


def token_bytes(engine: Tokenizer, rows: int = 0) -> npt.NDArray[np.int64] | None:
    """(V,) UTF-8 bytes of the text of each token id, for at least `rows` ids; None where tokens do not say.

    They do in byte-level vocabularies (GPT-2's alphabet of bytes), and in those that write a space as sentencepiece
    does, with or without bytes as a fallback. Special tokens stand for no text. Of text that the tokenizer changes (by
    a normalizer, or by a space put before it) it is the changed text's bytes that add up.
    """
    settings: dict[str, Any] = json.loads(engine.to_str())
    kinds = set(_kinds(settings.get("decoder"))) | set(_kinds(settings.get("pre_tokenizer")))
    byte_level = "ByteLevel" in kinds
    if not byte_level and _SPACE not in json.dumps(settings.get("decoder"), ensure_ascii=False):
        return None
    vocabulary, added = engine.get_vocab(with_added_tokens=True), engine.get_added_tokens_decoder()
    counts = np.zeros(max(rows, max(vocabulary.values(), default=-1) + 1), dtype=np.int64)
    for token, i in vocabulary.items():
        if not byte_level and _BYTE.fullmatch(token):
            counts[i] = 1
        elif i in added:
            counts[i] = 0 if added[i].special else len(token.encode())
        else:  # in GPT-2's alphabet each character is a byte
            counts[i] = len(token) if byte_level else len(token.replace(_SPACE, " ").encode())
    return counts


def _kinds(settings: Any) -> list[str]:
    """The types of a decoder or pre-tokenizer and of those in it."""
    if not isinstance(settings, dict):
        return []
    inner = [kind for values in settings.values() if isinstance(values, list) for v in values for kind in _kinds(v)]
    return [str(settings.get("type")), *inner]
