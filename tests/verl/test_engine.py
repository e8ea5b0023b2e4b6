"""longspan's engine under verl's own TrainingWorker equals one dense float64 model; run by make test-verl."""

from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from longspan.testing import run_ranks
from tests.parity import shared_at_any_price

pytestmark = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed here: make test-verl")
EXACT = 1e-12
FLOAT32 = 1e-6  # verl's worker makes a float32 of a loss
PLANS = {
    "dynamic": {},
    "degree 1": {"planner": "fixed", "context_parallel_size": 1, "max_tokens_per_slot": 200},
    "degree 2": {"planner": "fixed", "context_parallel_size": 2},
    "tp 2": {"planner": "fixed", "context_parallel_size": 1, "tp": 2, "max_tokens_per_slot": 200},
}
LOSSES: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "token-sum": {"loss_agg_mode": "token-sum"},
    "seq-mean-token-sum": {"loss_agg_mode": "seq-mean-token-sum"},
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean", "use_kl_loss": True, "kl_loss_coef": 0.1},
    "seq-mean-token-sum-norm": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 150},
    "norm of the longest": {"loss_agg_mode": "seq-mean-token-sum-norm"},
    "entropy": {"loss_agg_mode": "token-mean", "entropy_coeff": 0.1},
    "gspo": {"loss_agg_mode": "seq-mean-token-mean", "loss_mode": "gspo"},
}


def update_errors(rank: int, folder: Path, plan: str, losses: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Relative errors by loss and by what is compared; of rank 0, which alone answers verl."""
    from transformers import AutoModelForCausalLM

    from tests.verl import workers as w

    path = w.write_model(folder)
    worker, found = w.make_worker(path, **PLANS[plan]), {}
    for name, settings in losses.items():
        mode = {"policy_loss": w.PolicyLossConfig(loss_mode=settings["loss_mode"])} if "loss_mode" in settings else {}
        loss_fn = w.actor_loss(**{key: x for key, x in settings.items() if key != "loss_mode"} | mode)
        worker.reset()
        worker.set_loss_fn(loss_fn)
        model = AutoModelForCausalLM.from_pretrained(path, dtype="float64")
        loss, norm, output = w.dense_update(model, w.make_batch(), loss_fn, w.adamw(model))
        answer = worker.infer_batch(w.make_batch(compute_loss=False))
        with worker.engine.train_mode():
            batch = w.make_batch(return_model_output=True, max_token_len_per_gpu=w.CAP)
            kept = worker.engine.forward_backward_batch(batch, loss_fn)["model_output"]
        metrics = w.metrics_of(worker.train_batch(w.make_batch()))
        weights = w.engine_weights(worker)
        if rank == 0:
            found[name] = {f"kept {key}": w.answer_difference(kept[key], output[key]) for key in output}
            found[name] |= {key: w.answer_difference(answer[key], output[key]) for key in output} | {
                "loss": abs(metrics["loss"] - loss) / abs(loss),
                "norm": abs(metrics["grad_norm"] - norm) / norm,
                "weights": w.largest_difference(weights, model.state_dict()),
            }
    worker.engine.world.close()
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_updates_of_an_actor_are_those_of_a_dense_model(plan: str, tmp_path: Path) -> None:
    losses = (
        LOSSES
        if plan in ("dynamic", "degree 2")
        else {name: LOSSES[name] for name in ("token-mean", "entropy", "gspo")}
    )
    errors = run_ranks(update_errors, 2, tmp_path / "model", plan, losses, timeout=200)[0]
    assert errors.keys() == losses.keys()
    for name, found in errors.items():
        assert found.pop("loss") < FLOAT32, (name, found)
        assert max(found.values()) < EXACT, (name, found)


def shared_prompts_errors(rank: int, folder: Path, plan: str) -> dict[str, float]:
    """Of an actor, a reference and a critic whose prompts of three tokens and more are computed once."""
    from functools import partial

    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    from tests.train.own_loss.test_families import casts_in_float64
    from tests.verl import workers as w

    errors = dict[str, float]()
    kinds: dict[str, Any] = {
        "language_model": (AutoModelForCausalLM, partial(w.actor_loss, entropy_coeff=0.1)),
        "value_model": (AutoModelForTokenClassification, w.critic_loss),
    }
    with shared_at_any_price() as found:
        for kind, (stock, make_loss) in kinds.items():
            critic = kind == "value_model"
            path = w.write_model(folder / kind, head=critic)
            with casts_in_float64():
                worker = w.make_worker(path, kind, **PLANS[plan])
                worker.set_loss_fn(loss_fn := make_loss())
                model = stock.from_pretrained(path, dtype="float64")
                batch = partial(w.make_batch, alike=True)
                loss, norm, output = w.dense_update(model, batch(), loss_fn, w.adamw(model), critic=critic)
                answer = worker.infer_batch(batch(compute_loss=False))
                metrics = w.metrics_of(worker.train_batch(batch()))
                weights = w.engine_weights(worker)
            if rank == 0:
                errors[f"loss {kind}"] = abs(metrics["loss"] - loss) / abs(loss) / FLOAT32
                errors[f"norm {kind}"] = abs(metrics["grad_norm"] - norm) / norm / EXACT
                errors |= {f"{key} {kind}": w.answer_difference(answer[key], output[key]) / EXACT for key in output}
                errors[f"weights {kind}"] = w.largest_difference(weights, model.state_dict()) / EXACT
            worker.engine.world.close()
    return errors | {"prefixes": 0.0 if set(found) == {2} else np.inf}


@pytest.mark.parametrize("plan", ["dynamic", "degree 2"])
def test_prompts_that_samples_share_are_computed_once(plan: str, tmp_path: Path) -> None:
    errors = run_ranks(shared_prompts_errors, 2, tmp_path, plan, timeout=200)[0]
    assert len(errors) == 11 and max(errors.values()) < 1, errors


def shared_by_plan(rank: int, folder: Path) -> tuple[list[bool], int]:
    """Whether two samples of one prompt share it, and eight, over two slots by the price of a Qwen3-8B; and how many
    lines say so after two plans of eight.
    """
    from unittest.mock import patch

    from longspan import Document
    from longspan.plan import Cost
    from longspan.train import prefix_sharing
    from tests.verl import workers as w

    draw = np.random.default_rng(0)
    prompt = draw.integers(3, 60, 300)
    ids = [np.append(prompt, draw.integers(3, 60, 4 + i)) for i in range(8)]
    documents = [Document(x, loss_mask=np.arange(len(x)) >= 300) for x in ids]
    engine = w.make_worker(w.write_model(folder), planner="fixed", context_parallel_size=1).engine
    data = w.make_batch(max_token_len_per_gpu=4096)
    with patch.object(engine, "_cost", return_value=Cost()), patch.object(prefix_sharing, "_log") as log:
        plans = [engine._plan(documents[:count], data, forward_only=False)[1] for count in (2, 8, 8)]
    engine.world.close()
    lines = sum("computed once" in call.args[1] for call in log.warning.call_args_list)
    return [plan.parents is not None for plan in plans], lines


def test_a_prompt_is_shared_where_the_plan_is_predicted_to_be_faster(tmp_path: Path) -> None:
    first, second = run_ranks(shared_by_plan, 2, tmp_path / "model", timeout=200)
    assert (first, second) == (([False, True, True], 1), ([False, True, True], 0))


def image_errors(rank: int, folder: Path) -> dict[str, float]:
    from transformers import AutoModelForImageTextToText

    from tests.verl import workers as w

    vision = {"hidden_size": 16, "depth": 2, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32}
    changes = {
        "text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
    }
    changes |= {"vision_config": vision | {"patch_size": 2}, "image_token_id": w.IMAGE, "video_token_id": 61}
    path = w.write_model(folder, "qwen2_5_vl", **changes)
    worker = w.make_worker(path)
    worker.set_loss_fn(loss_fn := w.actor_loss())
    model = AutoModelForImageTextToText.from_pretrained(path, dtype="float64")
    model_before = deepcopy(model)
    _, norm, output = w.dense_update(model, w.make_batch(images=True), loss_fn, w.adamw(model))
    answer = worker.infer_batch(w.make_batch(images=True, compute_loss=False))
    texts = worker.infer_batch(w.make_batch(compute_loss=False))  # of the same model, without an image
    dense_texts = w.dense_output(model_before, w.make_batch())["log_probs"]
    found = w.metrics_of(worker.train_batch(w.make_batch(images=True)))
    weights = w.engine_weights(worker)
    worker.engine.world.close()
    if rank:
        return {}
    return {
        "log_probs": w.answer_difference(answer["log_probs"], output["log_probs"]),
        "texts": w.answer_difference(texts["log_probs"], dense_texts),
        "norm": abs(found["grad_norm"] - norm) / norm,
        "weights": w.largest_difference(weights, {name: model.state_dict()[name] for name in weights}),
        "without": float(len(model.state_dict()) - len(weights)),
    }


def test_an_update_with_images_is_that_of_a_dense_model(tmp_path: Path) -> None:
    errors = run_ranks(image_errors, 2, tmp_path / "model", timeout=200)[0]
    assert len(errors) == 5 and max(errors.values()) < 1e-11, errors


def indexed_errors(rank: int, folder: Path) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    from longspan.model import preset_config
    from tests.verl import workers as w

    w.start_rank()
    config: Any = preset_config("deepseek-v32-tiny", vocab_size=w.VOCABULARY)
    config.index_topk, config.index_n_heads, config.pad_token_id = 24, 16, 0
    if rank == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).double().save_pretrained(folder)
    torch.distributed.barrier()
    worker = w.make_worker(str(folder))
    worker.set_loss_fn(loss_fn := w.actor_loss())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float64")
    model.set_experts_implementation("eager")
    _, norm, output = w.dense_update(model, w.make_batch(), loss_fn)
    answer = worker.infer_batch(w.make_batch(compute_loss=False))
    found = w.metrics_of(worker.train_batch(w.make_batch()))
    worker.engine.world.close()
    log_probs = answer["log_probs"] if rank == 0 else output["log_probs"]
    return {
        "log_probs": w.answer_difference(log_probs, output["log_probs"]),
        "norm": abs(found.get("grad_norm", norm) - norm) / norm,
    }


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV32Config"), reason="this transformers has no DeepSeek-V3.2")
def test_an_update_of_rows_that_choose_their_keys_is_that_of_a_dense_model(tmp_path: Path) -> None:
    errors = run_ranks(indexed_errors, 2, tmp_path / "model", timeout=200)[0]
    assert errors["log_probs"] < EXACT and errors["norm"] < 1e-10, errors  # the class has steps in float32


def critic_errors(rank: int, folder: Path) -> dict[str, float]:
    from transformers import AutoModelForTokenClassification

    from tests.verl import workers as w

    found = {}
    for name, head in (("classifier", True), ("language model", False)):
        path = w.write_model(folder / name.split()[0], head=head)
        worker = w.make_worker(path, "value_model")
        for mode in ("token-mean", "seq-mean-token-mean"):
            worker.reset()
            worker.set_loss_fn(loss_fn := w.critic_loss(loss_agg_mode=mode))
            model = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, dtype="float64")
            start = w.engine_weights(worker)
            model.load_state_dict({name: start.get(name, x) for name, x in model.state_dict().items()})
            loss, norm, output = w.dense_update(model, w.make_batch(), loss_fn, w.adamw(model), critic=True)
            answer = worker.infer_batch(w.make_batch(compute_loss=False))
            metrics = w.metrics_of(worker.train_batch(w.make_batch()))
            weights = w.engine_weights(worker)
            if rank == 0:
                found[f"loss {name} {mode}"] = abs(metrics["loss"] - loss) / abs(loss) / FLOAT32
                found[f"norm {name} {mode}"] = abs(metrics["grad_norm"] - norm) / norm / EXACT
                found[f"values {name} {mode}"] = w.answer_difference(answer["values"], output["values"]) / EXACT
                found[f"weights {name} {mode}"] = w.largest_difference(weights, model.state_dict()) / EXACT
    worker.engine.world.close()
    return found


def test_updates_of_a_critic_are_those_of_a_dense_model(tmp_path: Path) -> None:
    errors = run_ranks(critic_errors, 2, tmp_path, timeout=200)[0]
    assert len(errors) == 16 and max(errors.values()) < 1, errors
