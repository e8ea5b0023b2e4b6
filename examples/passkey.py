"""Passkey retrieval: does a model find a number that is hidden in filler text? Every length and depth is tried.

python examples/passkey.py                         # texts and a tokenizer in runs/passkey-text
longspan train examples/passkey.toml --world 4     # some minutes on CPUs
python examples/passkey.py runs/passkey/model 2    # at degree 2; any folder of a model and its tokenizer
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from longspan import Document, Layout, World, evaluate, load_model, prepare
from longspan.testing import run_ranks
from longspan.train import EvaluationOptions, PlannerConfig, TargetTokens

OPENING = "There is an important number hidden in a lot of text. Find it and memorize it."
FILLER = ["The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again."]
END, QUESTION = "<|endoftext|>", "What is the pass key? The pass key is"
SENTENCES, DEPTHS, SAMPLES = (4, 8, 16, 32, 64), (0.0, 0.25, 0.5, 0.75, 1.0), 4


def text(key: int, before: int, after: int, opening: str = OPENING) -> str:
    filler, words = FILLER * (before + after), f"The pass key is {key}. Remember it. {key} is the pass key."
    return " ".join([opening, *filler[:before], words, *filler[before : before + after], QUESTION, str(key)]).lstrip()


def write_texts(folder: Path, texts: int = 30_000, most: int = 20) -> None:
    draw = random.Random(0)
    counts = [round((most + 1) ** draw.random()) - 1 for _ in range(texts)]
    rows = [
        text(draw.randint(10_000, 99_999), n - (k := draw.randint(0, n)), k, draw.choice((OPENING, ""))) for n in counts
    ]
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    (folder / "texts/passkey.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    engine = Tokenizer(models.BPE())  # a token for every word, and one for each digit, as Qwen's has
    by_words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([*by_words])
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator(rows[:1000], trainers.BpeTrainer(special_tokens=[END], initial_alphabet=alphabet))
    PreTrainedTokenizerFast(tokenizer_object=engine, eos_token=END).save_pretrained(folder)
    print(f"{texts:,} texts, and a tokenizer of {engine.get_vocab_size()} ids, in {folder}")


def is_right(rows: TargetTokens) -> tuple[torch.Tensor, torch.Tensor]:
    return (rows.logits.argmax(-1) == rows.targets).double(), torch.ones_like(rows.losses)


def test(rank: int, folder: str, degree: int) -> list[str]:
    tokenizer, draw, documents = AutoTokenizer.from_pretrained(folder), random.Random(1), []
    cases = [(n, depth) for n in SENTENCES for depth in DEPTHS for _ in range(SAMPLES)]
    for n, depth in cases:
        whole = text(draw.randint(10_000, 99_999), before := round(depth * n), n - before)
        ids = tokenizer(whole, return_tensors="pt")["input_ids"][0]
        answer = len(tokenizer(whole[:-6])["input_ids"])  # the tokens from here on are the key
        documents.append(Document(ids, loss_mask=torch.arange(len(ids)) >= answer))
    with World(Layout(ranks=int(os.environ["WORLD_SIZE"]))) as world:
        model = prepare(load_model(folder), world)
        options = EvaluationOptions(document_metrics={"right": is_right})
        result = evaluate(model, documents, PlannerConfig.fixed(degree), world, options)
    found = [mean.sum == mean.count for mean in result.document_metrics["right"]]  # every token of the key
    shares = torch.tensor(found).double().reshape(len(SENTENCES), len(DEPTHS), SAMPLES).mean(-1).tolist()
    rows = zip(SENTENCES, shares, strict=True)
    lines = [f"{n:9d}  " + "  ".join(f"{share:10.0%}" for share in row) for n, row in rows]
    return ["sentences  " + "  ".join(f"depth {depth:<4g}" for depth in DEPTHS), *lines]


if __name__ == "__main__":
    if len(sys.argv) == 1:
        write_texts(Path("runs/passkey-text"))
    elif "RANK" in os.environ:
        print("\n".join(test(int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2]))))
    else:
        print("\n".join(run_ranks(test, int(sys.argv[2]), sys.argv[1], int(sys.argv[2]))[0]))
