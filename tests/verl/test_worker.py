"""What verl's loops ask of an engine beside updates: mini-batches, SFT, folders, adapters, offload, settings."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from longspan.testing import run_ranks

pytestmark = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed here: make test-verl")
EXACT = 1e-12
COSINE = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 1, "total_training_steps": 6, "min_lr_ratio": 0.1}


def mini_batch_errors(rank: int, folder: Path) -> dict[str, float]:
    """Two epochs of two mini-batches, as ActorRolloutRefWorker updates an actor, beside a reference."""
    import torch
    from transformers import AutoModelForCausalLM
    from verl.utils.torch_functional import get_cosine_schedule_with_warmup

    from tests.verl import workers as w

    path = w.write_model(folder / "model")
    reference, worker = (
        w.make_worker(path, forward_only=True),
        w.make_worker(path, optimizer={"clip_grad": 0.2} | COSINE),
    )
    worker.set_loss_fn(loss_fn := w.actor_loss())
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float64")
    optimizer = w.adamw(model)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 6, min_lr_ratio=0.1)
    rates, norms = [], []
    for _ in range(2):  # calls of verl, each one step of the schedule
        keywords = {"mini_batch_size": 3, "epochs": 2, "seed": 1, "dataloader_kwargs": {"shuffle": False}}
        found = w.metrics_of(worker.train_mini_batch(w.make_batch(global_batch_size=3, **keywords)))
        for half in (*w.tu.chunk_tensordict(w.make_batch(global_batch_size=3), 2),) * 2:
            w.dense_update(model, half, loss_fn)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2).item())
            optimizer.step()
        schedule.step()
        rates += [] if rank else [abs(found["lr"][0] - schedule.get_last_lr()[0])]
        worst = [abs(a - b) / b for a, b in zip(found["grad_norm"], norms[-4:], strict=True)] if rank == 0 else []
    errors = {"rates": max(rates, default=0.0), "norms": max(worst, default=0.0)}
    errors["weights"] = w.largest_difference(w.engine_weights(worker), model.state_dict())
    before = AutoModelForCausalLM.from_pretrained(path, dtype="float64")
    answer = reference.infer_batch(w.make_batch(compute_loss=False))
    if rank == 0:
        dense = w.dense_output(before, w.make_batch())["log_probs"]
        errors["reference"] = w.answer_difference(answer["log_probs"], dense)
    for engine in (worker.engine, reference.engine):
        engine.world.close()
    return errors


def test_mini_batches_schedules_and_a_reference_beside_the_actor(tmp_path: Path) -> None:
    errors = run_ranks(mini_batch_errors, 2, tmp_path, timeout=200)[0]
    assert len(errors) == 4 and max(errors.values()) < 1e-11, errors


def sft_errors(rank: int, folder: Path) -> dict[str, float]:
    """SFT's loss, and padded batches of answers beside nested ones."""
    import torch
    from transformers import AutoModelForCausalLM
    from verl.workers.utils.padding import left_right_2_no_padding

    from tests.verl import workers as w

    path = w.write_model(folder / "model")
    worker = w.make_worker(path)
    worker.set_loss_fn(loss_fn := w.partial(w.sft_loss, config=None))
    nested = w.make_batch(temperature=1.0)
    ids, lengths = list(nested["input_ids"].unbind()), w.LENGTHS
    masks = [torch.arange(p + r) >= p for p, r in lengths]

    def chats() -> Any:
        tensors = {name: nested[name] for name in ("input_ids", "position_ids")} | {"loss_mask": w.nest(masks)}
        return w.tu.get_tensordict(tensors, {"temperature": 1.0, "global_token_num": [len(i) for i in ids]})

    model = AutoModelForCausalLM.from_pretrained(path, dtype="float64")
    _, norm, _ = w.dense_update(model, chats(), loss_fn)
    found = [w.metrics_of(worker.train_batch(chats())).get("grad_norm", norm) / norm]
    width, answer = (max(x) for x in zip(*lengths, strict=True))
    rows = {"input_ids": torch.zeros(len(ids), width + answer, dtype=torch.long)}
    rows["attention_mask"] = torch.zeros_like(rows["input_ids"])
    of_answers = {"response_mask": torch.long, "old_log_probs": torch.float64, "advantages": torch.float64}
    rows |= {name: torch.zeros(len(ids), answer, dtype=dtype) for name, dtype in of_answers.items()}
    for k, (p, r) in enumerate(lengths):  # prompts padded on the left, answers on the right
        rows["input_ids"][k, width - p : width + r] = ids[k]
        rows["attention_mask"][k, width - p : width + r] = 1
        for name in of_answers:
            rows[name][k, :r] = nested[name].unbind()[k]
    rows |= {"prompts": rows["input_ids"][:, :width], "responses": rows["input_ids"][:, width:]}
    rows["position_ids"] = (rows["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    others = {"temperature": 0.7, "global_batch_size": len(ids), "global_token_num": [len(i) for i in ids]}
    worker.set_loss_fn(w.actor_loss())
    padded = left_right_2_no_padding(w.tu.get_tensordict(rows, others))
    norms = []
    for batch in (padded, w.make_batch(calculate_entropy=False)):
        worker.reset()
        norms.append(w.metrics_of(worker.train_batch(batch)).get("grad_norm", 1.0))
    worker.engine.world.close()
    return {"sft": abs(found[0] - 1), "padded": abs(norms[0] / norms[1] - 1)}


def test_sft_and_padded_batches(tmp_path: Path) -> None:
    errors = run_ranks(sft_errors, 2, tmp_path, timeout=200)[0]
    assert max(errors.values()) < EXACT, errors


def resumed_weights(rank: int, folder: Path) -> dict[str, float]:
    """Largest differences of an update after a save and a load, and after parameters and states left the device."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.verl import workers as w

    path, found = w.write_model(folder / "model"), {}
    everything = ["model", "optimizer", "extra", "hf_model"]
    plain = w.make_worker(path, optimizer=COSINE, checkpoint=everything)
    plain.set_loss_fn(loss_fn := w.actor_loss())
    for step in (1, 2, 3):
        plain.train_batch(w.make_batch())
        plain.save_checkpoint(str(folder / f"step_{step}" / "actor"), global_step=step, max_ckpt_to_keep=2)
    torch.distributed.barrier()  # the first rank removes
    kept = sorted(path.parent.name for path in folder.glob("step_*/actor"))
    assert kept == ["step_2", "step_3"], kept
    stock = AutoModelForCausalLM.from_pretrained(folder / "step_3/actor/huggingface", dtype="float64").state_dict()
    found["stock folder"] = w.largest_difference(w.engine_weights(plain), stock)
    last = w.engine_weights(plain)
    plain.load_checkpoint(str(folder / "step_2/actor"))
    plain.train_batch(w.make_batch())
    found["resumed"] = w.largest_difference(w.engine_weights(plain), last)
    away = w.make_worker(path, optimizer=COSINE, param_offload=True, optimizer_offload=True)
    away.set_loss_fn(loss_fn)
    for _ in range(3):
        away.train_batch(w.make_batch())
        assert away.engine._offloaded == {"model": True, "optimizer": True}
    found["offloaded"] = w.largest_difference(w.engine_weights(away), last)
    away.to("cpu")
    away.to("device")
    away.load_checkpoint(str(folder / "step_2/actor"))
    away.train_batch(w.make_batch())
    found["offloaded and resumed"] = w.largest_difference(w.engine_weights(away), last)
    for worker in (plain, away):
        worker.engine.world.close()
    return found


def test_checkpoints_and_offload_change_no_bit(tmp_path: Path) -> None:
    for found in run_ranks(resumed_weights, 2, tmp_path, timeout=200):
        assert len(found) == 4 and set(found.values()) == {0.0}, found


def adapter_errors(rank: int, folder: Path) -> dict[str, float]:
    import torch
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    from tests.verl import workers as w

    path, lora = w.write_model(folder / "model"), {"lora_rank": 4, "lora_alpha": 8}
    worker = w.make_worker(path, model=lora | {"lora": {"merge": False}})
    worker.set_loss_fn(loss_fn := w.actor_loss())
    weights, config = worker.engine.get_per_tensor_param(base_sync_done=True)
    start = {name: weight.clone() for name, weight in weights}
    assert config["r"] == 4 and all(".lora_" in name for name in start)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype="float64")
    base = stock.state_dict()
    dense = get_peft_model(
        stock, LoraConfig(r=4, lora_alpha=8, target_modules=config["target_modules"], task_type="CAUSAL_LM")
    ).double()
    set_peft_model_state_dict(dense, start)
    optimizer = w.adamw(dense)
    for _ in range(2):  # of the first B is 0, and A has no gradient
        _, norm, _ = w.dense_update(dense, w.make_batch(), loss_fn, optimizer)
        found = w.metrics_of(worker.train_batch(w.make_batch())).get("grad_norm", norm)
    own = dict(worker.engine.get_per_tensor_param(base_sync_done=True)[0])
    errors = {"norm": abs(found - norm) / norm}
    trained = {name: x for name, x in dense.named_parameters() if ".lora_" in name}
    errors["adapter"] = w.largest_difference(own, {name.replace(".default", ""): x.data for name, x in trained.items()})
    sent = dict(worker.engine.get_per_tensor_param(base_sync_done=False)[0])
    linears = {name for name in base if name.endswith("_proj.weight")}
    errors["base"] = w.largest_difference(
        sent,
        {name.replace(".weight", ".base_layer.weight") if name in linears else name: x for name, x in base.items()},
    )
    answer = worker.infer_batch(w.make_batch(compute_loss=False, no_lora_adapter=True))
    if rank == 0:
        with dense.disable_adapter(), torch.no_grad():
            output = w.dense_output(dense, w.make_batch())
        errors["reference"] = w.answer_difference(answer["log_probs"], output["log_probs"])
    worker.engine.model_config.lora["merge"] = True
    merged, none = worker.engine.get_per_tensor_param()
    assert none is None
    errors["merged"] = w.largest_difference(dict(merged), dense.merge_and_unload().state_dict())
    worker.engine.world.close()
    return errors


def test_an_adapter_is_trained_sent_and_left_out(tmp_path: Path) -> None:
    errors = run_ranks(adapter_errors, 2, tmp_path, timeout=200)[0]
    assert len(errors) == 5 and max(errors.values()) < EXACT, errors


HYBRID = {
    "num_hidden_layers": 4, "num_experts": 0, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def family_error(rank: int, folder: Path, kind: str, sizes: dict[str, Any]) -> tuple[float, list[str]]:
    """The relative error of the gradient's norm, and the names of weights that go to a rollout."""
    from transformers import AutoModelForCausalLM

    from tests.verl import workers as w

    path = w.write_model(folder, kind, **sizes)
    worker = w.make_worker(path, planner="fixed", context_parallel_size=2)
    worker.set_loss_fn(loss_fn := w.actor_loss())
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float64")
    model.set_experts_implementation("eager")  # grouped products of torch take no float64 on CPUs
    _, norm, _ = w.dense_update(model, w.make_batch(), loss_fn)
    found = w.metrics_of(worker.train_batch(w.make_batch())).get("grad_norm", norm)
    names = [name for name, _ in worker.engine.get_per_tensor_param()[0]]
    worker.engine.world.close()
    return abs(found - norm) / norm, names


@pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < (5, 17),
    reason="delta nets of transformers before 5.17 are refused",
)
def test_a_hybrid(tmp_path: Path) -> None:
    error, _ = run_ranks(family_error, 2, tmp_path / "model", "qwen3_next", HYBRID, timeout=200)[0]
    assert error < 1e-8  # delta nets compute in float32


def test_experts_have_the_names_that_vllm_loads(tmp_path: Path) -> None:
    error, names = run_ranks(family_error, 2, tmp_path / "model", "qwen3_moe", EXPERTS, timeout=200)[0]
    assert error < 1e-9 and "model.layers.0.mlp.experts.3.down_proj.weight" in names, names


def refusals(rank: int, folder: Path) -> list[str]:
    import torch

    from tests.verl import workers as w

    path, texts = w.write_model(folder / "model"), list[str]()

    def refused(call: Any) -> None:
        try:
            call()
        except Exception as error:
            texts.append(str(error))
        else:
            texts.append("")

    worker = w.make_worker(path)
    hot = w.make_batch(compute_loss=False)
    hot["temperature"] = torch.linspace(0.5, 1, 6)
    refused(lambda: worker.infer_batch(hot))
    for entries in ({"distillation_use_topk": True}, {"use_dynamic_bsz": False}):
        refused(lambda entries=entries: worker.infer_batch(w.make_batch(compute_loss=False, **entries)))
    for images in (w.make_images(), [{"pixel_values_videos": torch.zeros(8, 24)}, *[None] * 5]):
        batch = w.make_batch(compute_loss=False)
        batch["multi_modal_inputs"] = w.tu.get_tensordict({"x": images})["x"]
        refused(lambda batch=batch: worker.infer_batch(batch))
    refused(worker.engine.get_per_tensor_param_shard)
    refused(lambda: worker.save_checkpoint(str(folder), hdfs_path="hdfs://there"))
    refused(lambda: w.make_worker(path, model={"use_liger": True}))
    refused(lambda: w.LongspanEngineConfig(router_replay=w.EngineRouterReplayConfig(mode="R2")))
    refused(lambda: w.LongspanEngineConfig(context_parallel_size=2))
    worker.engine.world.close()
    return texts


def test_what_is_refused_is_named(tmp_path: Path) -> None:
    words = (
        "temperatures from 0.5 to 1", "distillation", "use_dynamic_bsz", "2 of 6 samples", "pixel_values_videos",
        "delta_sharded", "hdfs_path", "model.use_liger", "router_replay", "context_parallel_size",
    )  # fmt: skip
    for texts in run_ranks(refusals, 2, tmp_path, timeout=200):
        assert len(texts) == len(words) and all(map(str.__contains__, texts, words)), texts


def configuration(rank: int, folder: Path) -> dict[str, Any]:
    """What hydra makes of the packaged files, and which engines verl finds by the entry point alone."""
    from hydra import compose, initialize_config_module
    from omegaconf import open_dict
    from transformers import AutoConfig
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.workers.engine.base import EngineRegistry

    import verl  # noqa: F401

    found: dict[str, Any] = {kind: "longspan" in engines for kind, engines in EngineRegistry._engines.items()}
    sizes = {"vocab_size": 64, "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    AutoConfig.for_model("qwen3", architectures=["Qwen3ForCausalLM"], **sizes).save_pretrained(folder)
    overrides = [
        f"critic.model.path={folder}", "+critic.model.load_tokenizer=False",
        "hydra.searchpath=[pkg://longspan.verl.config]", "model_engine=longspan", "trainer.n_gpus_per_node=2",
        "+actor_rollout_ref.actor.engine.plan.max_cp=2", "+actor_rollout_ref.actor.engine.prepare.compiled=auto",
        "actor_rollout_ref.actor.use_kl_loss=True", "data.train_batch_size=256", "critic.enable=True",
        "actor_rollout_ref.rollout.name=vllm",
    ]  # fmt: skip
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    validate_config(config, use_reference_policy=True, use_critic=True)
    with open_dict(config.actor_rollout_ref.ref) as reference:  # as verl's worker renames these
        for name in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu"):
            new = name if name == "use_dynamic_bsz" else f"ppo_{name}"
            reference[new] = reference.pop(f"log_prob_{name}")
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        engine = omega_conf_to_dataclass(role).engine
        name = {True: "reference", False: "trained"}[engine.forward_only]
        found[f"{name} {role._target_}"] = (type(engine).__name__, dict(engine.plan), dict(engine.prepare))
    return found


def test_verl_finds_the_engines_and_reads_their_configuration(tmp_path: Path) -> None:
    (found,) = run_ranks(configuration, 1, tmp_path)
    name, config = "LongspanEngineConfig", "verl.workers.config"
    assert found == {
        "language_model": True,
        "value_model": True,
        f"trained {config}.ActorConfig": (name, {"max_cp": 2}, {"compiled": "auto"}),
        f"reference {config}.ActorConfig": (name, {}, {}),
        f"trained {config}.CriticConfig": (name, {}, {}),
    }
