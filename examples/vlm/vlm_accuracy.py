"""A metric of `make vlm`: the share of digits in answers for which the likeliest token is the right one.

The tokenizer is one of bytes, sorted, so that the ids of the digits follow one another.
"""

from tokenizers import pre_tokenizers

from longspan.train import TargetTokens

ZERO = sorted(pre_tokenizers.ByteLevel.alphabet()).index("0")


def digits_right(rows: TargetTokens) -> tuple[float, int]:
    """How many digits are right, and how many there are."""
    digits = (rows.targets >= ZERO) & (rows.targets < ZERO + 10)
    right = rows.logits[digits].argmax(-1) == rows.targets[digits]
    return float(right.sum()), int(digits.sum())
