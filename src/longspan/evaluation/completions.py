"""Completions of prompts by transformers' `generate`, over a stock copy of a prepared model on the first rank."""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.corpus.prompts import Prompt
from longspan.corpus.tokenizer import TextTokenizer
from longspan.errors import ModelError, plural
from longspan.model.stock_copy import StockCopy
from longspan.model.weights.hf_folder import read_generation_settings
from longspan.plain_text import bytes_text, seconds_text


class Completion(NamedTuple):
    """What a model wrote behind a prompt; `ended`: it came to an end by itself."""

    prompt: str
    completion: str
    tokens: int
    ended: bool
    seconds: float


class Completions(NamedTuple):
    """What a model wrote behind each prompt, in order, and what it took."""

    rows: list[Completion]
    cost: str


class CompletionSettings(NamedTuple):
    """How prompts are completed."""

    tokenizer: TextTokenizer
    # The folder may have settings of generation.
    folder: Path
    max_new_tokens: int
    seed: int = 0
    stopped: Callable[[], object] = bool  # asked on the first rank before each prompt: whether to stop


def complete_prompts(
    model: Module, prompts: Sequence[Prompt], world: World, settings: CompletionSettings
) -> Completions:
    """Complete prompts one after another; all ranks call it together, and get what the first rank wrote.

    Tokens are those of `generate` of the model that `save_model` writes, in the dtype in which this one computes: one
    sequence at a time, with a cache. Raises ModelError as StockCopy does.
    """
    stock_copy = StockCopy(model, world)

    def complete(stock: PreTrainedModel) -> Completions:
        """Complete the prompts on the first rank, with the stock copy, until all are done or `settings` stop it."""
        if not stock.can_generate():
            raise ModelError(
                f"{type(stock).__name__} scores documents, and generates nothing; give a language model"
            )
        began = time.monotonic()
        rows = list[Completion]()
        for prompt in prompts:
            if settings.stopped():
                break
            rows.append(_complete_prompt(stock, prompt, world.device, settings))
        return Completions(rows, _cost_text(rows, time.monotonic() - began, stock_copy))

    return stock_copy.run(complete, "completions")


def _cost_text(rows: Sequence[Completion], seconds: float, stock_copy: StockCopy) -> str:
    tokens = sum(row.tokens for row in rows)
    text = f"{plural(len(rows), 'completion')} of {plural(tokens, 'token')} in {seconds_text(seconds)}"
    text += f": {bytes_text(stock_copy.gathered_bytes)} of weights were gathered"
    text += f"; {stock_copy.staying} of {plural(stock_copy.layers, 'layer')} stayed on the first rank"
    if stock_copy.staying < stock_copy.layers:
        text += ", the others were gathered for each token"
    return text


def _complete_prompt(
    stock: PreTrainedModel, prompt: Prompt, device: torch.device, settings: CompletionSettings
) -> Completion:
    """The prompt's own temperature counts (0: the likeliest token). The states of random generators are restored."""
    began = time.monotonic()
    config: Any = read_generation_settings(settings.folder) or deepcopy(stock.generation_config)
    if config.eos_token_id is None:
        config.eos_token_id = settings.tokenizer.end
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if config.pad_token_id is None:  # nothing is padded; without it transformers warns
        config.pad_token_id = ends[0]
    config.max_new_tokens = settings.max_new_tokens
    config.max_length = None
    config.do_sample = bool(prompt.temperature)
    config.temperature = prompt.temperature or None
    if not config.do_sample:
        config.top_p = config.top_k = None
    ids = torch.tensor([prompt.ids], device=device)
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(settings.seed)
        generate: Any = stock.generate
        output = generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    new_ids = output[0, len(prompt.ids) :].tolist()
    text = settings.tokenizer.engine.decode(new_ids, skip_special_tokens=True)
    has_ended = bool(new_ids) and new_ids[-1] in ends
    return Completion(prompt.text, text, len(new_ids), has_ended, time.monotonic() - began)
