"""Long chats made of the sources of Python's standard library, and a tokenizer with a chat template to read them.

`python bench/data/made_chats.py made-chats --chats 200 --shortest 16384 --longest 131072` writes

    made-chats/chats.jsonl     a chat a line: {"messages": [...]}
    made-chats/tokenizer/      tokenizer.json and a ChatML template, without generation marks, as most models' are

In each turn the user pastes lines of a file and asks for its definitions; the assistant names them. Lengths, in tokens,
are drawn evenly in their logarithm. Nothing is downloaded, and the same arguments write the same files.
"""

import argparse
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SYSTEM = "You read Python files and name what they define."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--shortest", type=int, default=16384, help="tokens of a chat")
    parser.add_argument("--longest", type=int, default=131072, help="tokens of a chat")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    files = sources()
    tokenizer = made_tokenizer(files, flags.vocabulary)
    tokenizer.save_pretrained(flags.folder / "tokenizer")
    counts = [len(ids) for ids in tokenizer(files)["input_ids"]]  # pyright: ignore[reportArgumentType]
    rows = chats(files, counts, flags)
    with (flags.folder / "chats.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"messages": messages}) + "\n" for messages in rows)
    print(f"{flags.chats} chats in {flags.folder / 'chats.jsonl'}, tokenizer in {flags.folder / 'tokenizer'}")


def sources() -> list[str]:
    """The files of the standard library of 2 to 60 KB, in order of their names."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths if 2000 < path.stat().st_size < 60000]


def made_tokenizer(files: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    bare.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # pyright: ignore[reportCallIssue]
    bare.train_from_iterator(files, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|im_end|>", chat_template=TEMPLATE)


def chats(files: list[str], counts: list[int], flags: argparse.Namespace) -> Iterator[list[dict[str, str]]]:
    """Chats of about as many tokens as were drawn, never more than the longest."""
    random = Random(flags.seed)
    for _ in range(flags.chats):
        left = flags.shortest * (flags.longest / flags.shortest) ** random.random() - 64
        messages = [{"role": "system", "content": SYSTEM}]
        while True:
            index = random.randrange(len(files))
            lines = files[index].splitlines()
            share = min(1.0, 0.85 * left / counts[index])
            pasted = lines[: max(1, int(share * len(lines)))]
            names = re.findall(r"^(?:def|class) (\w+)", "\n".join(pasted), flags=re.MULTILINE)
            answer = "\n".join(f"- `{name}`" for name in names) or "It defines nothing at its top."
            messages += [{"role": "user", "content": "What does this define?\n\n" + "\n".join(pasted)}]
            messages += [{"role": "assistant", "content": answer}]
            left -= counts[index] * share + 6 * len(names) + 24
            if left < 512:
                break
        yield messages


if __name__ == "__main__":
    main()
