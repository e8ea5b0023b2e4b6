"""longspan's engines for verl 0.9: language models (actor, reference, SFT) and critics.

Each rank gets the whole mini-batch, and a plan shares its samples out: to verl the ranks are one data-parallel rank.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils as tu  # pyright: ignore[reportMissingImports]
from verl.utils.device import get_device_name  # pyright: ignore[reportMissingImports]
from verl.utils.fsdp_utils import replace_lora_wrapper  # pyright: ignore[reportMissingImports]
from verl.utils.py_functional import append_to_dict  # pyright: ignore[reportMissingImports]
from verl.utils.torch_functional import (  # pyright: ignore[reportMissingImports]
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)
from verl.workers.config.optimizer import build_optimizer  # pyright: ignore[reportMissingImports]
from verl.workers.engine.base import BaseEngine, BaseEngineCtx  # pyright: ignore[reportMissingImports]
from verl.workers.engine.fsdp.utils import unfuse_moe_params  # pyright: ignore[reportMissingImports]

from longspan.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from longspan.comm import World
from longspan.data.document import Document
from longspan.data.item_documents import MediaDocuments, items_at_placeholders
from longspan.data.scored_document import ScoredDocument
from longspan.errors import CheckpointError, ConfigError, DataError, NonFiniteError, PlanError
from longspan.hub import find_local_path
from longspan.layout import Layout
from longspan.model import disable_adapter, image_tokens, prepare, save_model, weights_by_name
from longspan.model.adapted_modules import belongs_to_adapter, name_without_adapter
from longspan.model.adapters.adapter_files import name_in_peft_files
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.load import load_model, torch_dtype
from longspan.model.marks import adapter_of_prepared_model
from longspan.model.saving.whole_weights import WholeWeights
from longspan.model.score_heads import add_score_head, score_class
from longspan.model.weights.hf_folder import FOLDER_OPTIONS
from longspan.plan import Cost, Plan
from longspan.plan.cost.machine import CostSettings
from longspan.resolve.ways import fastest_plan
from longspan.train import MicroBatchLoss, MicroBatchTokens, clip_grad_norm, run_step, token_log_probs, token_scores
from longspan.train.prefix_sharing import log_first_shared_prefixes, share_prefixes_where_faster
from longspan.verl.samples import Samples, pad_answers, read_samples
from longspan.verl.settings import LongspanEngineConfig


class _Mode(BaseEngineCtx):
    """Loads what is offloaded, and has the module in its mode, while verl's worker computes."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)


class LongspanEngine(BaseEngine):
    """A language model as verl's TrainingWorker runs it; made by `EngineRegistry.new`.

    verl's loss is a MicroBatchLoss: it adds over micro-batches, as it is divided by numbers of the whole mini-batch.
    """

    further_values: Mapping[str, str] = {
        "calculate_entropy": "entropy",
        "calculate_sum_pi_squared": "log_sum_sq_probs",
    }
    reads_images = True

    def __init__(
        self, model_config: Any, engine_config: LongspanEngineConfig, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        """Open the world of all ranks, and one group for each alone; the model is loaded by `initialize`.

        Raises ConfigError for settings of the model that this engine would leave out.
        """
        super().__init__()
        reasons = {
            "mtp.enable": (model_config.mtp.enable, "depths of multi-token prediction are not trained here"),
            "use_liger": (model_config.use_liger, "engine.prepare.fused_norms and .compiled choose kernels"),
            "tiled_mlp.enabled": (model_config.tiled_mlp.get("enabled"), "use engine.prepare.mlp_tile_tokens"),
            "target_parameters": (
                model_config.target_parameters,
                "adapters are on linears; name them in target_modules",
            ),
            "exclude_modules": (model_config.exclude_modules, "name the linears to adapt in target_modules"),
            "lora_adapter_path": (
                model_config.lora_adapter_path,
                "an adapter begins anew here; merge the old one into its model",
            ),
        }
        for key, (value, reason) in reasons.items():
            if value:
                raise ConfigError(f"model.{key} is {value!r}, which the longspan engine does not follow: {reason}")
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config
        self.mode: str | None = None
        self._has_images = self.reads_images and getattr(model_config.hf_config, "vision_config", None) is not None
        ranks = dist.get_world_size()
        home = Layout(ranks=ranks, tp=engine_config.tp, ep=engine_config.ep)
        self.world: World = World(home, device="cpu" if get_device_name() == "cpu" else None).open()
        self._alone = [dist.new_group([rank]) for rank in range(ranks)][dist.get_rank()]
        self._checkpoints: list[str] = []
        self._offloaded = {"model": False, "optimizer": False}

    # ---- places

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.engine_config.optimizer_offload

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> Any:
        """Return a group of this rank alone: to verl all ranks are one data-parallel rank."""
        return self._alone

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether this is the rank whose outputs verl reads."""
        return self.world.rank == self.world.home.ranks[0]

    # ---- the model

    def initialize(self) -> None:
        """Load the model of `model.path`, and make optimizer and schedule anew, as FSDP's engine does."""
        torch.manual_seed(self.engine_config.seed)
        model = self._load_model()
        keywords = dict(self.engine_config.prepare)
        if not self.engine_config.forward_only:
            keywords.setdefault("activation_checkpointing", self.model_config.enable_gradient_checkpointing)
            keywords.setdefault("offload_activations", self.model_config.enable_activation_offload)
        if self._has_images:
            keywords.setdefault("encoder", Layout(ranks=self.world.home.ranks))
        computes_in = torch_dtype(self.engine_config.dtype)
        keywords.setdefault("compute_dtype", None if computes_in == model.dtype else computes_in)
        self.module: Any = prepare(model, self.world, **keywords)
        self._offloaded = {"model": False, "optimizer": False}
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        if not self.engine_config.forward_only:
            trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            self.optimizer = build_optimizer(trained, self.optimizer_config)
            self.lr_scheduler = self._make_schedule()
        offload = self.is_param_offload_enabled
        self.to("cpu", model=offload, optimizer=self.is_optimizer_offload_enabled, grad=offload)

    def _make_schedule(self) -> Any:
        """The schedule is that of verl's FSDP engine."""
        settings = self.optimizer_config
        total = settings.total_training_steps
        warmup = settings.lr_warmup_steps
        if warmup is None or warmup <= 0:
            warmup = int(settings.lr_warmup_steps_ratio * total)
        if settings.lr_scheduler_type == "constant":
            return get_constant_schedule_with_warmup(self.optimizer, num_warmup_steps=warmup)
        return get_cosine_schedule_with_warmup(
            self.optimizer,
            num_warmup_steps=warmup,
            num_training_steps=total,
            min_lr_ratio=settings.min_lr_ratio,
            num_cycles=settings.num_cycles,
            zero_indexed_step=settings.zero_indexed_step,
        )

    def _load_model(self) -> Any:
        if (rank := self.model_config.lora_rank) > 0 and self._has_images:
            raise ConfigError(
                f"model.lora_rank is {rank}, and {self.model_config.hf_config.model_type} reads images: an adapter's "
                "weights beside a tower are not sent to the rollout; set lora_rank=0, or take a text model"
            )
        path = find_local_path(self.model_config.local_path, "model.path", weights=True)
        config = self._stock_configuration()
        model = load_model(
            path, config=config, dtype=self.engine_config.model_dtype, sharded=True, images=self._has_images
        )
        if rank > 0:
            names = self.model_config.target_modules
            if names == "all-linear":
                targets = ()
            elif isinstance(names, str):
                targets = (names,)
            else:
                targets = tuple(names)
            alpha = self.model_config.lora_alpha
            seed = self.engine_config.seed
            return add_lora(model, NewAdapter(rank=rank, alpha=alpha, targets=targets, seed=seed, base=path))
        return model

    def _stock_configuration(self) -> Any:
        # The copy has verl's override_config.
        config = deepcopy(self.model_config.hf_config)
        config._attn_implementation = "sdpa"  # verl's is flash_attention_2, which need not be there
        return config

    def train_mode(self, **keywords: Any) -> _Mode:
        return _Mode(self, "train", **keywords)

    def eval_mode(self, **keywords: Any) -> _Mode:
        return _Mode(self, "eval", **keywords)

    def disable_adapter(self) -> AbstractContextManager[None]:
        if adapter_of_prepared_model(self.module) is None:
            return nullcontext()
        return disable_adapter(self.module)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parameters with their gradients, and the optimizer's states, to the host ("cpu") or to the device."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        target = torch.device("cpu") if device == "cpu" else self.world.device
        if model:
            self.module.to(target)
            self._offloaded["model"] = device == "cpu"
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                state.update({name: x.to(target) for name, x in state.items() if isinstance(x, Tensor) and x.ndim})
            self._offloaded["optimizer"] = device == "cpu"

    @contextmanager
    def _device_context(self) -> Iterator[None]:
        """Those that were on the host go back there at the end, unless an error ends it."""
        was_offloaded = dict(self._offloaded)
        self.to(get_device_name(), **was_offloaded, grad=False)
        yield
        self.to("cpu", **was_offloaded, grad=False)

    # ---- steps

    def _plan(self, documents: Any, data: Any, *, forward_only: bool) -> tuple[Any, Plan]:
        """Documents with images stay whole. A slot has as many rows as the engine's key says, else as verl's number of
        tokens per GPU in this batch."""
        settings = self.engine_config
        limit = settings.max_tokens_per_slot
        if limit is None:
            if not tu.get_non_tensor_data(data, "use_dynamic_bsz", True):
                raise ConfigError(
                    "use_dynamic_bsz is False, and plans count tokens, not samples; set it to True with "
                    "ppo_max_token_len_per_gpu (of forward passes log_prob_max_token_len_per_gpu), or set "
                    "engine.max_tokens_per_slot"
                )
            limit = tu.get_non_tensor_data(data, "max_token_len_per_gpu", None)
        choice = settings.planner_choice(max_tokens_per_slot=limit, cost=self._cost(forward_only=forward_only))
        plan = partial(fastest_plan, choice)
        lengths = tuple(len(documents[d]) for d in range(len(documents)))
        if isinstance(documents, MediaDocuments):
            return documents, plan(lengths, self.world.home, targets=documents.targets)
        shared, made = share_prefixes_where_faster(
            self.module,
            documents,
            lengths,
            choice,
            self.world,
            training=not forward_only,
            targets=sum(document.targets for document in documents),
            plan=plan,
        )
        log_first_shared_prefixes(made, self.world)
        return shared, made

    def _cost(self, *, forward_only: bool) -> Cost:
        """Without a price of the model, that of a Qwen3-8B is taken."""
        home = self.world.home
        recomputes = self.model_config.enable_gradient_checkpointing and not forward_only
        try:
            return self.world.machine.cost(
                self.model_config.hf_config.get_text_config(),
                CostSettings(
                    checkpoint_policies="full" if recomputes else "none",
                    trains_all=not self.model_config.lora_rank,
                    shards=home.slots,
                    weight_ranks=home.tp,
                    ep=home.ep,
                    forward=forward_only,
                ),
            )
        except PlanError:  # a configuration that gives no price is planned for as a Qwen3-8B
            return Cost().forward_only() if forward_only else Cost()

    def _documents(self, samples: Samples) -> Any:
        documents = [
            Document(ids, loss_mask=mask) for ids, mask in zip(samples.ids, samples.predicted, strict=True)
        ]
        if not self._has_images:
            self._refuse_images(samples)
            return documents
        tokens = image_tokens(self.model_config.hf_config)
        rows = [[tokens.rows(image.grid) for image in images] for images in samples.images]
        grids = [np.array([x.grid for x in images if x.grid], np.int64).reshape(-1, 3) for images in samples.images]
        return MediaDocuments(
            documents,
            items_at_placeholders(samples.ids, tokens.placeholder, rows),
            [image for images in samples.images for image in images],
            positions=lambda d: tokens.positions(samples.ids[d], grids[d]),
        )

    def _refuse_images(self, samples: Samples) -> None:
        if any(samples.images):
            raise DataError(
                f"{sum(map(bool, samples.images))} of {len(samples.images)} samples of verl have images, and "
                f"{self.model_config.hf_config.model_type} reads texts alone here"
            )

    def _compute_values(
        self, plan: Plan, documents: Any, names: list[str], temperature: float
    ) -> dict[str, Callable[[int], Any]]:
        """Entered by every rank. Each name has a function from a document's number to its values (length,), with those
        of a prefix that it shares."""
        values = token_log_probs(self.module, plan, documents, self.world, also=names, temperature=temperature)
        return {"log_probs": values.of, **{name: partial(values.value, name) for name in names}}

    def _outputs(self, values: Mapping[str, Tensor], samples: Samples) -> dict[str, Tensor]:
        """Row j has the value of token j + 1, and 0 where no token is predicted."""
        predicts = torch.from_numpy(np.concatenate(samples.predicted)).roll(-1)
        rows = {name: x.roll(-1) for name, x in values.items()}  # a last row gets the 0 of the next first token
        # The exponential is 1 where nothing is predicted.
        if "log_sum_sq_probs" in rows:
            rows["sum_pi_squared"] = rows.pop("log_sum_sq_probs").exp() * predicts
        return {name: samples.nest(x.to(self._values_dtype)) for name, x in rows.items()}

    @property
    def _values_dtype(self) -> torch.dtype:
        if self.engine_config.model_dtype == "float64":
            return torch.float64
        return torch.float32

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> dict[str, Any]:
        """Return outputs, losses and metrics of a batch, as verl's engines do, and leave gradients unless forward only.

        In training the loss is computed for each micro-batch of the plan, between its forward and backward pass. With
        `forward_only` it is computed once of all outputs; without a `loss_function` the losses are then [1.0].
        """
        data = data.to("cpu")
        mask = data["loss_mask"]
        tokens = int((mask.values() if mask.is_nested else mask).sum())
        tu.assign_non_tensor(data, sp_size=1, dp_size=1, batch_num_tokens=tokens)
        samples = read_samples(data)
        temperature = self._temperature(data)
        names = [name for key, name in self.further_values.items() if tu.get_non_tensor_data(data, key, False)]
        documents = self._documents(samples)
        documents, plan = self._plan(documents, data, forward_only=forward_only)
        result: dict[str, Any] = {"model_output": {}, "loss": [], "metrics": {}}

        def compute_loss(output: dict[str, Tensor], data: Any) -> Tensor:
            """Return verl's loss of an output, and note it and its metrics in `result`."""
            loss, metrics = loss_function(model_output=output, data=data, dp_group=self._alone)
            result["loss"].append(float(loss.detach()))
            append_to_dict(result["metrics"], metrics)
            return loss

        numbers = range(len(samples.ids))
        if forward_only:
            values = self._compute_values(plan, documents, names, temperature)
            all_values = {
                name: torch.from_numpy(np.concatenate([values_of(d) for d in numbers]))
                for name, values_of in values.items()
            }
            result["model_output"] = self._outputs(all_values, samples)
            if loss_function is None:
                return result | {"loss": [1.0]}
            compute_loss(result["model_output"], data)
            return result
        padded = pad_answers(data)
        collected = dict[str, dict[int, Tensor]]()  # values of each document, by their names, where verl wants them

        def loss_of_tokens(tokens: MicroBatchTokens) -> Tensor:
            """Return verl's loss of one micro-batch by its tokens' values, and keep these in `collected`."""
            if tu.get_non_tensor_data(data, "return_model_output", False):
                for name, x in tokens.values.items():
                    parts = x.detach().split(tokens.lengths)
                    collected.setdefault(name, {}).update(zip(tokens.documents, parts, strict=True))
            part = tu.index_select_tensor_dict(padded, [*tokens.documents])
            return compute_loss(self._outputs(tokens.values, samples.select(tokens.documents)), part)

        loss = MicroBatchLoss(loss_of_tokens, also=names)
        run_step(self.module, plan, documents, self.world, loss=loss, temperature=temperature)
        all_values = {name: torch.cat([parts[d] for d in numbers]) for name, parts in collected.items()}
        return result | {"model_output": self._outputs(all_values, samples) if collected else {}}

    def _temperature(self, data: Any) -> float:
        values = torch.as_tensor(tu.get_non_tensor_data(data, "temperature", 1.0), dtype=torch.float64).flatten()
        if bool((values != values[0]).any()):
            raise DataError(
                f"the batch of verl has temperatures from {values.min():g} to {values.max():g}, and all logits of a "
                "step are divided by one; sample with one temperature"
            )
        return float(values[0])

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Clip gradients, update weights, and return the norm; nan, with gradients dropped, where it is not finite."""
        try:
            norm = clip_grad_norm(self.module, self.optimizer_config.clip_grad, self.world)
        except NonFiniteError as error:
            if self.is_mp_src_rank_with_outputs():
                print(f"WARN: no update: {error}")
            self.optimizer.zero_grad()
            return float("nan")
        self.optimizer.step()
        return norm

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step()
        return self.lr_scheduler.get_last_lr()[0]

    # ---- weights

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **keywords: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Return an iterator of whole weights by name, for the rollout, and an adapter's configuration; on all ranks.

        Without an adapter, or with model.lora.merge, it has the model's weights, the adapter merged, and the
        configuration is None. Else it has the weights of the model under the adapter, by names as in peft's wrapper, or
        with `base_sync_done`, once the rollout has these, the adapter's. All ranks must iterate, as they gather each
        weight together. Weights that are on the host move to the device before, and stay there.
        """
        self.to(get_device_name(), model=self._offloaded["model"], optimizer=False, grad=False)
        adapter = adapter_of_prepared_model(self.module)
        model_type = self.model_config.hf_config.model_type
        if adapter is None or self.model_config.lora.get("merge", False):
            merged = weights_by_name(self.module, self.world, merge_adapter=adapter is not None)
            return unfuse_moe_params(merged, model_type), None
        weights = WholeWeights(self.module, self.world)
        config = adapter.config
        adapter_names = {
            name: name_in_peft_files(name, adapter.name) for name in weights.names if belongs_to_adapter(name)
        }
        if base_sync_done:
            adapter_weights = (
                (peft_name, weights.gather_tensor(name)) for name, peft_name in adapter_names.items()
            )
            return adapter_weights, config.to_dict()
        base_weights = (
            (replace_lora_wrapper(name_without_adapter(name), config), weights.gather_tensor(name))
            for name in weights.names
            if name not in adapter_names
        )
        return unfuse_moe_params(base_weights, model_type), config.to_dict()

    def get_per_tensor_param_shard(self, **keywords: Any) -> Any:
        raise ConfigError(
            "checkpoint_engine.backend delta_sharded sends shards, which longspan does not give out; use naive or nccl"
        )

    get_per_tensor_param_delta_shard = get_per_tensor_param_shard

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **keywords: Any,
    ) -> None:
        """Write model, optimizer and schedule, which any number of ranks can load; entered by all ranks.

        With "hf_model" among the contents the folder `huggingface` has the model as transformers loads it. Of the
        checkpoints of this engine the newest `max_ckpt_to_keep` stay (None or 0: all).
        """
        _refuse_hdfs(hdfs_path)
        schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        with self._device_context():
            state = {"schedule": schedule}
            save_checkpoint(local_path, self.module, self.optimizer, self.world, step=global_step, state=state)
            if "hf_model" in self.checkpoint_config.save_contents:
                folder = Path(local_path, "huggingface")
                processor = self.model_config.get_processor()
                save_model(self.module, folder, self.world, tokenizer=processor)
        self._checkpoints.append(local_path)
        while max_ckpt_to_keep and len(self._checkpoints) > max_ckpt_to_keep:
            oldest = self._checkpoints.pop(0)
            if self.is_mp_src_rank_with_outputs():
                shutil.rmtree(oldest, ignore_errors=True)

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **keywords: Any,
    ) -> None:
        """Load what `save_checkpoint` wrote into `local_path`, which is kept. Raises CheckpointError for a folder that
        holds none.
        """
        if local_path is None:
            return
        _refuse_hdfs(hdfs_path)
        if (checkpoint := find_checkpoint(local_path, self.world)) is None:
            raise CheckpointError(
                f"{local_path} holds no checkpoint of longspan's engine; give the folder of its save"
            )
        with self._device_context():
            state = load_checkpoint(checkpoint, self.module, self.optimizer, self.world)
        if self.lr_scheduler is not None and state.get("schedule"):
            self.lr_scheduler.load_state_dict(state["schedule"])
            for group, lr in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = lr


def _refuse_hdfs(path: str | None) -> None:
    if path is not None:
        raise ConfigError(f"hdfs_path is {path!r}; checkpoints go to folders that all machines share: leave it out")


class LongspanValueEngine(LongspanEngine):
    """A critic: a token classifier with one score of each row, or a language model's base with a new head."""

    further_values: Mapping[str, str] = {}
    reads_images = False

    def _load_model(self) -> Any:
        """The folder's own head, or a new one on a language model."""
        path = find_local_path(self.model_config.local_path, "model.path", weights=True)
        config = self._stock_configuration()
        config.num_labels = 1
        # verl's engines have no dropout either.
        config.classifier_dropout = config.hidden_dropout = config.summary_dropout_prob = 0.0
        dtype = self.engine_config.model_dtype
        kind = self.model_config.architectures[0]
        if kind.endswith("ForSequenceClassification"):  # a reward model, whose head a critic of tokens goes on with
            stock: Any = score_class(config, "ForTokenClassification")
            return stock.from_pretrained(path, config=config, dtype=torch_dtype(dtype), **FOLDER_OPTIONS)
        model = load_model(path, config=config, dtype=dtype, sharded=True)
        has_head = kind.endswith("ForTokenClassification")
        if has_head:
            return model
        return add_score_head(model, tokens=True, seed=self.engine_config.seed)

    def _documents(self, samples: Samples) -> Any:
        self._refuse_images(samples)
        rows = [np.flatnonzero(mask) - 1 for mask in samples.predicted]  # row j predicts token j + 1
        return [ScoredDocument(ids, rows=chosen) for ids, chosen in zip(samples.ids, rows, strict=True)]

    def _compute_values(
        self, plan: Plan, documents: Any, names: list[str], temperature: float
    ) -> dict[str, Callable[[int], Any]]:
        """(length,)"""
        values = token_scores(self.module, plan, documents, self.world)
        return {"scores": lambda document: values.of(document)[:, 0]}

    def _outputs(self, values: Mapping[str, Tensor], samples: Samples) -> dict[str, Tensor]:
        return {"values": samples.nest(values["scores"].to(self._values_dtype))}

    def _temperature(self, data: Any) -> float:
        # Scores have no temperature.
        return 1.0
