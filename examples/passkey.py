"""Makes text for examples/passkey.toml: a number hidden in filler and asked for at the end, and a tokenizer for it.

python examples/passkey.py runs/passkey-text
longspan train examples/passkey.toml --world 4        # some minutes on CPUs
longspan eval runs/passkey --world 4 --passkey.lengths 96 128 160 192 256 384 --plot passkey.svg
"""

import json
import math
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from longspan.train import PASSKEY_OPENING, passkey_text

TEXTS, MOST_SENTENCES = 30_000, 20


def text(draw: random.Random) -> str:
    """A text with a key of its own; most are short, half begin without the opening: most tokens teach something."""
    sentences = round(math.exp(draw.uniform(0, math.log(MOST_SENTENCES + 1)))) - 1
    before = draw.randint(0, sentences)
    whole = passkey_text(draw.randint(10_000, 99_999), before, sentences - before)
    return whole.removeprefix(f"{PASSKEY_OPENING} ") if draw.random() < 0.5 else whole


def small_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE with a token for every word of these texts, and one for each digit, as Qwen's has."""
    engine = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    engine.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator(texts, trainer)
    return engine


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/passkey-text")
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    texts = [text(draw) for _ in range(TEXTS)]
    lines = "".join(json.dumps({"text": one}) + "\n" for one in texts)
    (folder / "texts" / "passkey.jsonl").write_text(lines)
    tokenizer = small_tokenizer(texts[:1000])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts[:1000])) * TEXTS // 1000
    print(f"{TEXTS:,} texts of about {tokens:,} tokens in {folder}; a tokenizer of {tokenizer.get_vocab_size()} ids")
