"""Rows with labels, margins or pairs of answers: what is read of them, and a pair as one sample."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from longspan.corpus.rows.sample import Sample, UnseenCounts
from longspan.corpus.rows.values import RowError, has_value, number_in_text, short_repr


def pair_with_prompt(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a pair with its prompt: without one what both answers begin with, as TRL's `extract_prompt` has it.

    >>> pair_with_prompt({"chosen": "Why? It is.", "rejected": "Why? No."})
    {'chosen': ' It is.', 'rejected': ' No.', 'prompt': 'Why?'}
    """
    chosen = values["chosen"]
    rejected = values["rejected"]
    if values.get("prompt") is not None or not isinstance(chosen, str | list) or type(chosen) is not type(rejected):
        return values
    differences = (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    end = next(differences, min(len(chosen), len(rejected)))
    if chosen[end - 1 : end] == " ":  # a blank between prompt and answer belongs to the answer
        end -= 1
    return {**values, "chosen": chosen[end:], "rejected": rejected[end:], "prompt": chosen[:end]}


def drop_repeated_prompt(values: Mapping[str, Any], keys: Sequence[str]) -> Mapping[str, Any]:
    """Return a row without the copy of its prompt's messages with which all answers, under `keys`, begin.

    >>> turn = {"role": "user", "content": "Why?"}
    >>> drop_repeated_prompt({"prompt": [turn], "completion": [turn, {"role": "assistant"}]}, ["completion"])
    {'prompt': [{'role': 'user', 'content': 'Why?'}], 'completion': [{'role': 'assistant'}]}
    """
    prompt = values.get("prompt")
    answers = {key: values.get(key) for key in keys if key != "prompt"}
    if not isinstance(prompt, list) or not prompt:
        return values
    others = {
        key: answer[len(prompt) :]
        for key, answer in answers.items()
        if isinstance(answer, list) and answer[: len(prompt)] == prompt
    }
    return {**values, **others} if len(others) == len(answers) else values


def check_not_empty(value: Any, name: str) -> None:
    """Raise RowError for a prompt or an answer without text, calls or images."""
    messages = value if isinstance(value, list) else []
    contents = [value]
    if messages:
        contents = [m.get("content") or m.get("tool_calls") for m in messages if isinstance(m, dict)]
    if any(has_value(content.strip() if isinstance(content, str) else content) for content in contents):
        return
    if name == "prompt":
        raise RowError(
            "it has no prompt, and its answers do not begin with the same text; give one, or name its column: "
            'data.rename_columns = ["question=NAME"] for one that the chat template writes, ["prompt=NAME"] for a text'
        )
    raise RowError(f"{name} is empty: {short_repr(value)}; give an answer, or leave the row out")


def join_samples(first: Sample, second: Sample) -> Sample:
    """Return one sample with two documents of a row end to end, and their ends as `stops`."""
    assert first.labels is not None and second.labels is not None
    length = len(first.ids)
    moved = (image._replace(start=image.start + length, stop=image.stop + length) for image in second.images)
    unseen: Any = zip(first.unseen, second.unseen, strict=True)
    return first._replace(
        ids=np.concatenate([first.ids, second.ids]),
        labels=np.concatenate([first.labels, second.labels]),
        unseen=UnseenCounts(*(a + b for a, b in unseen)),
        images=(*first.images, *moved),
        stops=(length, length + len(second.ids)),
    )


def read_label(values: Mapping[str, Any], num_labels: int, name: str = "label") -> tuple[float, ...]:
    """Return the label of a row's document under the key `name`: a number for each of `num_labels` scores, or the
    number of one of as many classes.

    Raises RowError for another label, and without one.
    """
    label = number_in_text(values.get(name))
    if label is None:
        raise RowError(f'needs "{name}", as model.num_labels is {num_labels}; found keys {sorted(values)}')
    numbers = label.tolist() if isinstance(label, np.ndarray) else label
    numbers = numbers if isinstance(numbers, list) else [numbers]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise RowError(f"{name} is {short_repr(label)}; give a finite number, or a list of such")
    if len(numbers) not in (1, num_labels):
        raise RowError(
            f"{name} has {len(numbers)} numbers, and model.num_labels is {num_labels}; give one, or as many"
        )
    if len(numbers) < num_labels and numbers[0] not in range(num_labels):
        raise RowError(
            f"{name} is {numbers[0]}, and model.num_labels is {num_labels}: classes are 0 to {num_labels - 1}"
        )
    return tuple(map(float, numbers))
