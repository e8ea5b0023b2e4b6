"""SFT of chats with TRL: the line that makes the trainer is all that differs from a script of TRL. docs/trainer.md.

`torchrun --nproc-per-node 2 examples/sft_trl.py --cp 2` trains a tiny model on made chats, and `--model FOLDER --chats
FILE` a model of your own on a file of chats. `--cp` processes share each document. A test swaps the line and runs the
stock script in one process (tests/hf/test_examples.py).
"""

import argparse
from pathlib import Path
from tempfile import mkdtemp

import torch
from datasets import Dataset, load_dataset
from trl import SFTConfig, SFTTrainer

from longspan import load_model
from longspan.corpus import train_tokenizer
from longspan.hf import LongspanArguments, with_longspan

TEMPLATE = (  # it marks what the assistant says
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def made_chats(count: int) -> Dataset:
    """Chats that count, some of them far."""
    ranges = [range(i % 7, i % 7 + 4 + (i * i) % 60) for i in range(count)]
    questions = [f"Count from {numbers.start}, {len(numbers)} numbers." for numbers in ranges]
    answers = [" ".join(map(str, numbers)) for numbers in ranges]
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(questions, answers, strict=True)
    ]
    return Dataset.from_list([{"messages": messages} for messages in turns])


def make_model() -> str:
    """A folder with a tiny model and a tokenizer, as `from_pretrained` reads it; the same on every process."""
    folder = mkdtemp()
    torch.manual_seed(0)
    load_model(preset="qwen3-tiny", vocab_size=300).save_pretrained(folder)
    train_tokenizer([str(row) for row in made_chats(50)["messages"]], 300).save_pretrained(folder)
    Path(folder, "chat_template.jinja").write_text(TEMPLATE)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="a folder of transformers; empty: a tiny model, made here")
    parser.add_argument("--chats", default="", help="a .jsonl file of rows with messages; empty: made chats")
    parser.add_argument("--cp", type=int, default=1, help="processes that share a document")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default="runs/sft_trl")
    options = parser.parse_args()
    chats = load_dataset("json", data_files=options.chats, split="train") if options.chats else made_chats(400)
    folder, layout = options.model or make_model(), LongspanArguments(context_parallel_size=options.cp)
    args = SFTConfig(
        output_dir=options.output,
        per_device_train_batch_size=4,
        max_steps=options.steps,
        learning_rate=1e-5 if options.model else 3e-3,
        max_length=None,
        assistant_only_loss=True,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=10,
        report_to=[],
    )
    trainer = with_longspan(SFTTrainer)(model=folder, args=args, train_dataset=chats, longspan=layout)
    trainer.train()
    trainer.save_model()
    trainer.end()


if __name__ == "__main__":
    main()
