"""Training a causal language model on a folder of texts with transformers' Trainer: one line differs from stock.

`torchrun --nproc-per-node 2 examples/trainer.py --text_folder TEXTS --output_dir runs/clm --context_parallel_size 2`
trains a tiny model with a tokenizer of these texts; `--model_name_or_path FOLDER` one of your own. The program has the
shape of transformers' run_clm.py, and takes the flags of TrainingArguments and LongspanArguments (on CPUs --use_cpu).
A test swaps the line and runs the stock script in one process (tests/hf/test_examples.py). docs/trainer.md explains it.
"""

import math
from dataclasses import dataclass, field
from tempfile import mkdtemp
from typing import Any

from datasets import DatasetDict, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from longspan import load_model
from longspan.corpus import train_tokenizer
from longspan.hf import LongspanArguments, with_longspan


@dataclass
class ModelArguments:
    """Which model is trained."""

    model_name_or_path: str = field(default="", metadata={"help": "a folder of transformers; empty: a tiny model"})
    vocab_size: int = field(default=1024, metadata={"help": "of the tiny model"})


@dataclass
class DataTrainingArguments:
    """On which texts."""

    text_folder: str = field(metadata={"help": "a folder of .txt files, one document each"})
    block_size: int = field(default=1024, metadata={"help": "tokens at which documents are cut"})
    validation_split: float = field(default=0.1, metadata={"help": "the share of documents that is held out"})


def load_parts(name: str, vocab_size: int, texts: list[str]) -> tuple[Any, Any]:
    """A model and its tokenizer from a folder, or a tiny model with a tokenizer of the texts."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    folder = mkdtemp()
    train_tokenizer(texts, vocab_size).save_pretrained(folder)
    return load_model(preset="qwen3-tiny", vocab_size=vocab_size), AutoTokenizer.from_pretrained(folder)


def tokenize(texts: DatasetDict, tokenizer: Any, block_size: int) -> DatasetDict:
    """Documents of at most `block_size` tokens; nothing is joined or padded to a block."""

    def cut(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": tokenizer(rows["text"], truncation=True, max_length=block_size)["input_ids"]}

    return texts.map(cut, batched=True, remove_columns=["text"])


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments, LongspanArguments))
    model_args, data_args, training_args, longspan_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    texts = load_dataset("text", data_files=f"{data_args.text_folder}/*.txt", sample_by="document", split="train")
    texts = texts.train_test_split(data_args.validation_split, seed=training_args.seed)
    model, tokenizer = load_parts(model_args.model_name_or_path, model_args.vocab_size, texts["train"]["text"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = tokenize(texts, tokenizer, data_args.block_size)
    parts = {
        "model": model,
        "data_collator": DataCollatorForLanguageModeling(tokenizer, mlm=False),
        "train_dataset": data["train"],
        "eval_dataset": data["test"],
        "processing_class": tokenizer,
    }
    trainer = with_longspan(Trainer)(**parts, args=training_args, longspan=longspan_args)
    trained = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", trained.metrics)
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.end()


if __name__ == "__main__":
    main()
