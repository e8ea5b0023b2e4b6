"""What a longspan trainer does not run is refused by name at construction, and nothing is left open."""

import os
import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForMaskedLM, ProcessorMixin, Trainer, TrainerCallback, TrainingArguments
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.trainer_callback import ExportableState
from trl import BEMACallback, DPOConfig, GRPOConfig

from longspan.errors import LongspanError, ModelError
from longspan.hf import LongspanArguments, LongspanTrainer, with_longspan
from longspan.hf.facade import TokenOutput
from longspan.hf.one_process import OneProcess
from longspan.hf.refusals import _LAUNCHER_SETTINGS, _SETTINGS, refusals_of_arguments, refuse_hooks
from longspan.testing import run_ranks
from tests.hf.stock import CP2, Run
from tests.hf.test_grpo import RuledGRPO, luck, prompts
from tests.hf.test_scores import scored
from tests.hf.test_trainer import Halved, Texts
from tests.hf.tiny import model_of, pad, tokenizer
from tests.model.stock import without_trials


def _model(**values: Any) -> Any:
    model = model_of()
    for name, value in values.items():
        setattr(model, name, value)
    return model


def _dropping() -> Any:
    model = model_of()
    model.model.layers[0].self_attn.attention_dropout = 0.1
    return model


def _bert() -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForMaskedLM(BertConfig(vocab_size=16, **sizes))


def _routed() -> Any:
    model = model_of("qwen3-moe")
    model.config.output_router_logits = True
    return model


class ReadsLogits(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        return model(**inputs).logits.mean()


def _mean_of_first(outputs: Any, *_: Any, **__: Any) -> Any:
    return outputs[0].mean()


def _sees() -> None:
    model, processor = model_of(), ProcessorMixin()
    model.config.vision_config, processor.image_processor = {}, "of images"
    _make(model=model, processing_class=processor)


def _launched(name: str, value: str) -> None:
    os.environ[name] = value
    try:
        _make()
    finally:
        del os.environ[name]


def _grpo(lora: Any = None, **settings: Any) -> None:
    args = GRPOConfig(**Run("unused").arguments(), num_generations=2, **settings)
    data = {"train_dataset": prompts(), "processing_class": tokenizer(), "reward_funcs": luck, "peft_config": lora}
    with_longspan(RuledGRPO)(model=model_of(), args=args, **data, longspan=LongspanArguments(**ALONE))


def _unsaved(folder: str = "unused", **values: Any) -> None:
    model, keywords = model_of(), dict[str, Any]()
    for name, value in values.items():
        if name in ("callbacks", "processing_class"):
            keywords[name] = value
        else:
            setattr(model.config, name, value)
    _make(model=model, args={"save_strategy": "steps", "output_dir": folder}, **keywords)


class Hooked(Trainer):
    """Adds what an inner module makes to the loss, by a hook that is there for one call."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        outputs = []
        hook = self.model.model.layers[0].mlp.register_forward_hook(lambda *call: outputs.append(call[-1]))
        loss = super().compute_loss(model, inputs, *args, **keywords)
        hook.remove()
        return loss + sum(x.square().mean() for x in outputs)


def _note_output(*_: Any) -> None: ...


def _hooked() -> Any:
    model = model_of()
    model.lm_head.register_forward_pre_hook(partial(_note_output, 1))
    return model


def _masked() -> Any:
    model = model_of(tie_word_embeddings=False)
    model.lm_head.weight.register_hook(lambda gradient: gradient * 0)
    return model


class Masking(TrainerCallback):
    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        model.model.embed_tokens.weight.register_hook(lambda gradient: gradient * 0)


class KeepingMLP(Qwen3MLP):
    def forward(self, x: Any) -> Any:
        out = super().forward(x)
        self.layer_loss = out.square().mean()
        return out


def _keeping(model: Any) -> Any:
    model.model.layers[1].mlp.__class__ = KeepingMLP
    return model


class AddsKept(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **keywords) + self.model.model.layers[1].mlp.layer_loss


class Sharded(Trainer):
    """A penalty as scripts of stock write it."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **keywords)
        return loss + 0.005 * sum(p.pow(2).sum() for p in model.parameters())


class Backward(Sharded):
    def training_step(self, model: Any, inputs: Any, *_: Any) -> Any:
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()


def _with_optimizer(trainer: Any, model: Any = None) -> None:
    trainer.optimizer = torch.optim.AdamW((model or trainer.model).parameters())
    trainer.train()


class Exchanging(TrainerCallback):
    """Gives its trainer another optimizer amid the training, of a model of its own."""

    trainer: Any

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer.optimizer = torch.optim.SGD(model_of().parameters(), lr=0.1)


def _exchanged(trainer: Any) -> None:
    callback = Exchanging()
    callback.trainer = trainer
    trainer.add_callback(callback)
    trainer.train()


def _classified(labels: Any, model: Any = None, **values: Any) -> None:
    model = model or scored(3)
    for name, value in values.items():
        setattr(model.config, name, value)
    rows = [{"input_ids": [3, 4, 5], "labels": labels}] * 4
    _trained(model=model, train_dataset=rows, data_collator=_classes)


def _classes(rows: Any) -> dict[str, Any]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


class Saving(TrainerCallback):
    def on_train_end(self, *_: Any, model: Any, **__: Any) -> None:
        model.save_pretrained("saved")


class Unwritable(TrainerCallback, ExportableState):
    def state(self) -> dict[str, Any]:
        return {"args": {"seen": {1, 2}}, "attributes": {}}


def _with_pixels(rows: Any) -> dict[str, Any]:
    return pad(rows) | {"pixel_values": torch.zeros(1)}


ALONE = CP2 | {"context_parallel_size": 1}


def _make(kind: Any = Trainer, longspan: dict[str, Any] | None = None, **keywords: Any) -> Any:
    changes = keywords.pop("args", {})
    after = {name: changes.pop(name) for name in ("deepspeed", "fsdp", "parallelism_config") if name in changes}
    args = TrainingArguments(**Run("unused").arguments() | changes)
    for name, value in after.items():  # as it stands at construction
        setattr(args, name, value)
    given = {"model": model_of(), "data_collator": pad, "train_dataset": Texts(8)} | keywords
    return with_longspan(kind)(**given, args=args, longspan=LongspanArguments(**ALONE | (longspan or {})))


LORA = LoraConfig(target_modules=["q_proj"])
OPTIMIZER = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
CASES: dict[str, tuple[Any, str]] = {
    "deepspeed": (lambda: _make(args={"deepspeed": {"zero": 3}}), "args.deepspeed is {'zero': 3}, which a longspan"),
    "fsdp": (lambda: _make(args={"fsdp": "full_shard"}), "args.fsdp is 'full_shard', which a longspan trainer"),
    "parallelism_config": (lambda: _make(args={"parallelism_config": "cp"}), "args.parallelism_config is 'cp'"),
    "torch_compile": (lambda: _make(args={"torch_compile": True}), "args.torch_compile is True"),
    "auto_find_batch_size": (lambda: _make(args={"auto_find_batch_size": True}), "max_tokens_per_slot bounds"),
    "neftune": (lambda: _make(args={"neftune_noise_alpha": 5.0}), "args.neftune_noise_alpha is 5.0"),
    "label smoothing": (lambda: _make(args={"label_smoothing_factor": 0.1}), "args.label_smoothing_factor is 0.1"),
    "liger": (lambda: _make(args={"use_liger_kernel": True}), "args.use_liger_kernel is True"),
    "bf16_full_eval": (lambda: _make(args={"bf16_full_eval": True}), "args.bf16_full_eval is True"),
    "push_to_hub": (lambda: _make(args={"push_to_hub": True}), "push the saved folder afterwards"),
    "jit checkpoint": (lambda: _make(args={"enable_jit_checkpoint": True}), "args.enable_jit_checkpoint is True"),
    "optim": (lambda: _make(args={"optim": "adafactor"}), "args.optim is 'adafactor', which a longspan trainer"),
    "split_batches": (lambda: _make(args={"accelerator_config": {"split_batches": True}}), "split_batches is true"),
    "order of workers": (
        lambda: _make(args={"dataloader_in_order": False, "dataloader_num_workers": 2}),
        "args.dataloader_in_order is False with 2 workers: batches would come as workers end",
    ),
    "no args": (lambda: with_longspan(Trainer)(model_of()), "without TrainingArguments, and longspan must give it the"),
    "optimizers=": (lambda: _make(optimizers=(OPTIMIZER, None)), "optimizers= brings an optimizer of parameters"),
    "launcher's fsdp": (lambda: _launched("ACCELERATE_USE_FSDP", "true"), "ACCELERATE_USE_FSDP is 'true' in the"),
    "launcher's compiler": (
        lambda: _launched("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
        "ACCELERATE_DYNAMO_BACKEND is 'INDUCTOR' in the environment, from the configuration of accelerate launch",
    ),
    "launcher's fp16": (lambda: _launched("ACCELERATE_MIXED_PRECISION", "fp16"), "args.mixed_precision is 'fp16'"),
    "entropy_coef": (lambda: _grpo(entropy_coef=0.01), "args.entropy_coef is 0.01, which a longspan trainer does not"),
    "adaptive entropy": (lambda: _grpo(use_adaptive_entropy=True), "args.use_adaptive_entropy is True"),
    "dropout of an adapter": (
        lambda: _grpo(lora=LoraConfig(lora_dropout=0.05)),
        "drops 0.05 of its inputs of Qwen3ForCausalLM, and the loss of LongspanRuledGRPO takes two forward passes",
    ),
    "pp": (lambda: _make(longspan={"pp": 2}), "pp is 2: a longspan trainer runs no pipelines"),
    "device_map": (lambda: _make(model=_model(hf_device_map={"a": 0, "b": 1})), "a device_map over 2 devices"),
    "quantized": (
        lambda: _make(model=_model(is_quantized=True)),
        "is quantized (transformers), and whole weights are trained",
    ),
    "no causal model": (lambda: _make(model=_bert()), "BertForMaskedLM is no causal language model"),
    "router loss": (lambda: _make(model=_routed()), "output_router_logits of Qwen3MoeForCausalLM adds"),
    "dropout": (lambda: _make(Halved, model=_dropping()), "drops 0.1 of its attention weights of Qwen3ForCausalLM"),
    "search": (lambda: _ended(lambda t: t.hyperparameter_search()), "hyperparameter_search is not run by a longspan"),
    "logits": (
        lambda: _trained(kind=ReadsLogits),
        "a loss reads 'logits' of the model's output; under longspan it may read loss, and",
    ),
    "first of outputs": (
        lambda: _trained(compute_loss_func=_mean_of_first),
        "a loss reads 0 of the model's output; under longspan it may read loss, and",
    ),
    "images": (lambda: _trained(data_collator=_with_pixels), "pixel_values"),
    "processor of images": (_sees, "Qwen3ForCausalLM with ProcessorMixin reads images, which a longspan trainer"),
    "config": (lambda: _unsaved(own=open), "a save into unused would fail, tried before training: TypeError: Object"),
    "tokenizer": (lambda: _unsaved(processing_class=pad), "AttributeError: 'function' object has no attribute 'save_p"),
    "callback": (lambda: _unsaved(callbacks=[Unwritable()]), "TypeError: Object of type set is not JSON serializable"),
    "folder": (lambda: _unsaved(__file__), "test_refusals.py"),
    "degree": (
        lambda: _make(longspan={"context_parallel_size": 2}),
        "context_parallel_size 2 does not divide 1 slot (1 rank / tp 1 / pp 1); use 1, or start a multiple of 2 "
        "processes (torchrun --nproc-per-node 2; accelerate launch --cpu starts only one)",
    ),
    "no degree": (lambda: _make(longspan={"context_parallel_size": -2}), "context_parallel_size is -2"),
    "bytes": (lambda: _make(longspan={"device_memory_limit": -1}), "device_memory_limit is -1; it must be at least 0"),
    "rows": (
        lambda: _make(longspan={"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}),
        "hierarchical_context_parallel_sizes (2, 2) multiply to 4, but the group has context_parallel_size 1",
    ),
    "long document": (lambda: _trained(longspan={"max_tokens_per_slot": "16", "context_parallel_size": 1}), "cp 1"),
    "saving in a callback": (
        lambda: _trained(callbacks=[Saving()]),
        "Qwen3ForCausalLM.save_pretrained would write what this rank holds of a prepared model; call "
        "trainer.save_model(folder) on all ranks",
    ),
    "saving an adapter in a callback": (
        lambda: _trained(callbacks=[Saving()], model=get_peft_model(model_of(), LORA)),
        "PeftModel.save_pretrained: the model inside it was prepared, and lies on several ranks; call "
        "trainer.save_model(folder) on all ranks",
    ),
    "hook of a loss": (
        lambda: _trained(kind=Hooked),
        "model.layers.0.mlp has a forward hook, <lambda> of tests.hf.test_refusals: a pass has some of a batch",
    ),
    "hook": (lambda: _trained(model=_hooked()), "lm_head has a forward hook, _note_output of tests.hf.test_refusals"),
    "gradient hook": (lambda: _trained(model=_masked()), "lm_head.weight has a hook on its gradient, which FSDP2"),
    "gradient hook amid training": (
        lambda: _trained(callbacks=[Masking()]),
        "model.embed_tokens.weight has a hook on its gradient, which FSDP2 does not run for a gradient that it sums",
    ),
    "kept tensor": (
        lambda: _trained(kind=AddsKept, model=_keeping(model_of())),
        "tensors of a pass are kept with their graph, ['model.layers.1.mlp.layer_loss']: a pass has some of",
    ),
    "kept tensor of scores": (
        lambda: _classified(1, _keeping(scored(3))),
        "tensors of a pass are kept with their graph, ['model.layers.1.mlp.layer_loss']: a pass has some of",
    ),
    "sharded penalty": (
        lambda: _trained(kind=Sharded),
        "the loss depends on sharded parameters, of which a rank holds a part; take them whole: p.full_tensor()",
    ),
    "sharded penalty, backward": (lambda: _trained(kind=Backward), "the loss depends on sharded parameters, of which"),
    "second model": (
        lambda: _trained(callbacks=[BEMACallback()]),
        "a second Qwen3ForCausalLM is made by the prepared model's class, as by TRL's BEMACallback: its weights",
    ),
    "optimizer before train": (
        lambda: _ended(_with_optimizer),
        "the optimizer, AdamW, holds 0 of the 25 parameters that Qwen3ForCausalLM trains, and 25 others, of which 25 "
        "were its own before prepare replaced them ['model.embed_tokens.weight']; make the optimizer after prepare, of",
    ),
    "optimizer of another model": (
        lambda: _ended(lambda trainer: _with_optimizer(trainer, model_of())),
        "holds 0 of the 25 parameters that Qwen3ForCausalLM trains, and 25 others, of which 0 were its own before",
    ),
    "optimizer amid training": (lambda: _ended(_exchanged), "the optimizer, SGD, holds 0 of the 25 parameters that"),
    "labels of another problem": (
        lambda: _classified(1, problem_type="multi_label_classification"),
        "problem_type 'multi_label_classification' takes 3 labels of a row, and rows have 1",
    ),
    "several labels": (
        lambda: _classified([1, 0, 1], problem_type="single_label_classification"),
        "problem_type 'single_label_classification' takes 1 label of a row, and rows have 3",
    ),
    "classes as floats": (
        lambda: _classified(1.0),
        "problem_type 'multi_label_classification' takes 3 labels of a row, and rows have 1",
    ),
    "no Trainer": (lambda: with_longspan(dict), "with_longspan takes a Trainer class, and got <class 'dict'>"),
    "planner": (lambda: _make(longspan={"planner": "fixt"}), "planner"),
}


def _trained(**keywords: Any) -> None:
    _ended(lambda trainer: trainer.train(), **keywords)


def _ended(use: Any, **keywords: Any) -> None:
    trainer = _make(**keywords)
    try:
        use(trainer)
    finally:
        trainer.end()


def refusals(rank: int, folder: str) -> dict[str, tuple[str, bool]]:
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, (make, _) in CASES.items():
        try:
            with without_trials() if found else nullcontext():  # the first model is tried
                make()
            found[name] = ("nothing was refused", True)
        except LongspanError as error:
            found[name] = (str(error), OneProcess.now is None)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, bool]]:
    return run_ranks(refusals, 1, str(tmp_path_factory.mktemp("refusals")))[0]


@pytest.mark.parametrize("name", CASES)
def test_is_refused_by_name(name: str, found: dict[str, tuple[str, bool]]) -> None:
    message, closed = found[name]
    assert CASES[name][1] in message
    assert closed, "a refused trainer leaves nothing open"
    assert not re.search(r"\b(context|parallel|train|run)\.\w|--world|longspan\.save_model", message), "words of a run"


@pytest.mark.parametrize("name", _LAUNCHER_SETTINGS)
def test_what_accelerate_launch_asks_for_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = GRPOConfig(**Run("unused").arguments(), num_generations=2)
    monkeypatch.setenv(name, "true")
    (reason,) = refusals_of_arguments(args, LongspanArguments(), {})
    assert reason.startswith(f"{name} is 'true' in the environment, from the configuration of accelerate launch")


def test_every_setting_of_the_table_is_one_of_trainers_and_refused() -> None:
    for name in _SETTINGS:
        args = GRPOConfig(**Run("unused").arguments(), num_generations=2)
        assert hasattr(args, name) or hasattr(DPOConfig, name), name
        setattr(args, name, 0.5)
        (reason,) = refusals_of_arguments(args, LongspanArguments(), {})
        assert reason.startswith(f"args.{name} is 0.5, which a longspan trainer does not run: ")


@pytest.mark.parametrize("name", ["logits", "items", 0])
def test_an_output_by_key_is_refused_by_name_like_one_by_attribute(name: Any) -> None:
    output = TokenOutput(loss=1.0)
    assert output["loss"] == output.loss == 1.0
    with pytest.raises(ModelError, match=f"a loss reads {name!r} of the model's output"):
        output[name]


def test_a_class_is_wrapped_once() -> None:
    assert with_longspan(LongspanTrainer) is LongspanTrainer


def test_a_model_is_looked_at_for_hooks_once_after_each_hook_that_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, model, other = list[Any](), torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)
    monkeypatch.setattr("longspan.hf.refusals.refuse_gradient_hooks", looks.append)
    for _ in range(3):
        refuse_hooks(model)
    assert len(looks) == 1
    other.register_forward_hook(print)
    refuse_hooks(model)
    assert len(looks) == 2
    hook = model[0].register_forward_hook(_note_output)
    for _ in range(2):
        with pytest.raises(ModelError, match="0 has a forward hook, _note_output"):
            refuse_hooks(model)
    hook.remove()
    refuse_hooks(model)
    refuse_hooks(model)
    assert len(looks) == 5
