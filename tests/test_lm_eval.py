"""Tasks of lm-eval on models under a longspan home: their numbers are those of one dense float64 model."""

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoTokenizer

from longspan import Layout, PlannerConfig, World
from longspan.corpus.tokenizer import train_tokenizer
from longspan.errors import ConfigError, EvaluationError
from longspan.testing import backend, run_ranks
from tests.model.deep import deep
from tests.model.stock import prepare_untried

PAIRS = (
    ("the answer to the question is", " yes"),
    ("the answer to the question is ", "no, it is not"),  # the space belongs to the continuation
    ("", "a text without a context"),
    ("a long context, " * 12, "and its end"),
)
TEXTS = ("one text of some words, and then of some more words", "another", "a long document, " * 15)


class Request(NamedTuple):
    args: tuple[str, ...]
    task_name: str = "a_task"


class StubLM:
    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        lm: Any = self
        stem = context.rstrip()
        context, continuation, encode = stem, context[len(stem) :] + continuation, lm.tok_encode
        ids = encode(context)
        return ids, encode(context + continuation)[len(ids) :]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        lm: Any = self
        pairs = [
            lm._encode_pair(*request.args)
            if request.args[0]
            else ([lm.prefix_token_id], lm.tok_encode(request.args[1], add_special_tokens=False))
            for request in requests
        ]
        return lm._loglikelihood_tokens([(request.args, *pair) for request, pair in zip(requests, pairs, strict=True)])


def adapter() -> Any:
    if find_spec("lm_eval") is None:
        module: Any = ModuleType("lm_eval.api.model")
        module.TemplateLM = StubLM
        names = {"lm_eval": ModuleType("lm_eval"), "lm_eval.api": ModuleType("lm_eval.api"), module.__name__: module}
        sys.modules.update(names)
        sys.modules.pop("longspan.lm_eval", None)
        adapter_class = import_module("longspan.lm_eval").LongspanLM
        for name in (*names, "longspan.lm_eval"):
            del sys.modules[name]
        return adapter_class
    return import_module("longspan.lm_eval").LongspanLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([" ".join([*(a + b for a, b in PAIRS), *TEXTS])], 280).save_pretrained(path)
    return path


@cache
def model_of() -> Any:
    return deep("qwen3", torch.float64, 2, 280)


def dense(ids: list[int], scored: int) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model_of()(torch.tensor([ids])).logits[0, -scored - 1 : -1]
    targets = torch.tensor(ids[-scored:])
    values = logits.log_softmax(-1).gather(1, targets[:, None])
    return values.sum().item(), bool((logits.argmax(-1) == targets).all())


CHOICES = {
    "cp 1": PlannerConfig.fixed(1, max_tokens_per_slot=128),
    "cp 2": PlannerConfig.fixed(2, max_tokens_per_slot=64),
    "dynamic": PlannerConfig.dynamic(max_tokens_per_slot=64),
}


def score(rank: int, folder: Path) -> tuple[dict[str, Any], str]:
    """The results of each plan, with a pair that the model decodes greedily, and how a task that generates is refused.

    The model and the tokenizer are those of every rank.
    """
    tokenizer, results = AutoTokenizer.from_pretrained(folder), dict[str, Any]()
    context, *answers = greedy_pair(tokenizer)
    with World(Layout(2), backend=backend(), timeout=60) as world:
        model = prepare_untried(model_of(), world)
        for name, choice in CHOICES.items():
            lm = adapter()(model, tokenizer, world, choice)
            pairs = lm.loglikelihood([Request(pair) for pair in PAIRS])
            greedy = lm._loglikelihood_tokens([(None, context, ids) for ids in answers])
            results[name] = pairs, greedy, lm.loglikelihood_rolling([Request((text,)) for text in TEXTS])
        with pytest.raises(EvaluationError) as refused:
            adapter()(model, tokenizer, world, CHOICES["cp 1"]).generate_until([Request(("say it", ""), "gsm8k")])
    return results, str(refused.value)


def greedy_pair(tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    context, answer = tokenizer.encode(PAIRS[0][0]), list[int]()
    for _ in range(3):
        with torch.no_grad():
            answer.append(int(model_of()(torch.tensor([context + answer])).logits[0, -1].argmax()))
    return context, answer, [*answer[:-1], answer[-1] ^ 1]


def test_log_likelihoods_are_those_of_a_dense_model(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    expected = []
    for context, continuation in PAIRS:
        stem = context.rstrip()
        ids = tokenizer.encode(context + continuation) if context else [start, *tokenizer.encode(continuation)]
        expected.append(dense(ids, len(ids) - (len(tokenizer.encode(stem)) if context else 1)))
    rolling = [dense([start, *ids], len(ids)) for ids in map(tokenizer.encode, TEXTS)]
    context, answer, other = greedy_pair(tokenizer)
    first, second = run_ranks(score, 2, folder)
    assert first == second  # every rank has every result
    for pairs, greedy, texts in first[0].values():
        assert [value for value, _ in pairs] == pytest.approx([value for value, _ in expected], rel=1e-12)
        assert [likeliest for _, likeliest in pairs] == [likeliest for _, likeliest in expected]
        for (found, likeliest), ids in zip(greedy, (answer, other), strict=True):
            assert found == pytest.approx(dense(context + ids, 3)[0], rel=1e-12) and likeliest == (ids == answer)
        assert texts == pytest.approx([value for value, _ in rolling], rel=1e-12)
    assert "the task gsm8k has its answers generated (generate_until)" in first[1]


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_the_error_names_the_extra() -> None:
    module: Any = import_module("longspan.lm_eval")
    with pytest.raises(ConfigError, match=r"pip install 'longspan\[lm-eval\]'"):
        module.LongspanLM(None, None, None, None)


def test_the_beginning_of_a_text_is_put_once_and_where_it_is_asked_for() -> None:
    class Words:
        bos_token_id: int | None = 1
        eos_token_id, name_or_path = None, "of/words"

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            words = text.replace("<s>", "<s> ").split()
            return [1] * add_special_tokens + [1 if word == "<s>" else 5 for word in words]

        def decode(self, token: int) -> str:
            return "<s>"

    lm = adapter()(None, Words(), None, None)
    assert lm.tok_encode("a b") == [1, 5, 5] and lm.tok_encode("<s>a b") == [1, 5, 5]
    assert lm.tok_encode("a b", add_special_tokens=False) == [5, 5]
    assert adapter()(None, Words(), None, None, add_bos_token=False).tok_encode("a b") == [5, 5]
    assert (lm.prefix_token_id, lm.tokenizer_name) == (1, "of__words")
    Words.bos_token_id = None
    with pytest.raises(ConfigError, match="names neither a bos_token nor an eos_token"):
        adapter()(None, Words(), None, None)
