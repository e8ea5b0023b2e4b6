"""Bytes of tokens add up to those of their text, whatever the kind of vocabulary."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from longspan.corpus.tokenizer import token_bytes, train_tokenizer

TEXTS = ["def layout(rank):\n    return rank\n" * 5, "für alle Ränge: übrig ✓\n", "plan " * 30]
BYTE_LEVEL = train_tokenizer(TEXTS, 300).engine


def _sentencepiece() -> Tokenizer:
    """A vocabulary as Llama 2's: ▁ for spaces, bytes as a fallback."""
    engine = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    engine.normalizer = normalizers.Replace(" ", "\u2581")
    engine.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    engine.train_from_iterator(TEXTS, trainer)
    return engine


SENTENCEPIECE = _sentencepiece()


@settings(deadline=None, derandomize=True)
@pytest.mark.parametrize("engine", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\u2581<>"), max_size=40))
def test_bytes_of_tokens_add_up_to_those_of_the_text(engine: Tokenizer, text: str) -> None:
    counts = token_bytes(engine)
    assert counts is not None
    assert counts[engine.encode(text, add_special_tokens=False).ids].sum() == len(text.encode())


def test_special_tokens_stand_for_no_text_and_added_ones_for_theirs() -> None:
    engine = Tokenizer.from_str(BYTE_LEVEL.to_str())
    engine.add_special_tokens(["<|pad|>"])
    engine.add_tokens([AddedToken("größe", normalized=False)])
    counts = token_bytes(engine, 400)
    assert counts is not None
    assert len(counts) == 400
    assert counts[engine.token_to_id("<|pad|>")] == 0
    assert counts[engine.token_to_id("größe")] == 7
    assert not counts[engine.get_vocab_size() :].any()


def test_a_vocabulary_that_does_not_say_has_none() -> None:
    engine = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    assert token_bytes(engine) is None
