"""Form: how a run holds weights, gradients, states and activations, said once for plans, prices, keys and `prepare`.

A key of it is a field here; what decides, prices and does it reads the field. No torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, get_args

from longspan.errors import PlanError, plural
from longspan.plan.check import check_count

CheckpointPolicy = Literal["none", "exchanged", "selective", "full", "selective+host", "full+host"]
# What a decoder layer keeps from its forward to its backward pass, fastest first: all; its input, attention's output
# and log-sum-exp, and what a2a types exchanged; the same without what was exchanged; its input; these on the host.
CHECKPOINT_POLICIES: tuple[CheckpointPolicy, ...] = get_args(CheckpointPolicy)
ON_HOST = "+host"
Recomputation = Literal["none", "exchanged", "selective", "full"]
Compiled = Literal["auto", "layers", "none"]
FrozenWeights = Literal["auto", "whole", "nf4", "stored"]


@dataclass(frozen=True, kw_only=True)
class Form:
    """What of a run changes its bytes, its seconds, and what `prepare` does with its model.

    >>> Form(checkpoint_policies="full", reshard_after_forward=False).recomputation
    'full'

    `checkpoint_policies` is a word for all layers, or one for each, those of multi-token prediction last (None: none is
    given, and layers keep all). Without `reshard_after_forward` weights stay gathered through a step, and without
    `sync_each_batch`, which needs that, gradients are summed once a step, by its last backward pass. Under
    `offload_optimizer_states` states wait on the host, under `offload_weights` weights, with their gradients and
    states; of a model with an adapter frozen weights alone. MLPs and experts compute at most `mlp_tile_tokens` rows at
    once (0: all), and `segment_layers` neighbouring layers that recompute keep one input together (0 or 1: each its
    own). Under an adapter the other weights are stored as `frozen` says. Layers multiply in `float8`, and are
    `compiled` on GPUs. There are `mtp_layers` of multi-token prediction, and norms hold rows / tp where
    `sequence_parallel`.
    """

    checkpoint_policies: str | Sequence[str] | None = None
    reshard_after_forward: bool = True
    sync_each_batch: bool = True
    offload_optimizer_states: bool = False
    offload_weights: bool = False
    mlp_tile_tokens: int = 0
    segment_layers: int = 0
    frozen: FrozenWeights = "whole"
    float8: Literal["", "rowwise"] = ""
    compiled: Compiled = "none"
    mtp_layers: int = 0
    sequence_parallel: bool = False

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Form":
        """Return the form among the values of a record, as `to_json` of a plan of memory gives them."""
        return Form(**{field.name: values[field.name] for field in fields(Form) if field.name in values})

    @property
    def form(self) -> "Form":
        """The form alone, of a record that has more."""
        return Form(**self._values())

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(Form)}

    def with_form(self, form: "Form") -> Self:
        """Return this record with the form of another one."""
        return replace(self, **form._values())

    def check_counts(self, record: str) -> None:
        """Raise PlanError for a negative number; `record` is what the error says that it is of."""
        for field in fields(Form):
            if field.type is int:
                check_count(f"{field.name} of {record}", getattr(self, field.name), least=0)

    @property
    def recomputation(self) -> Recomputation:
        """What most of the recomputed layers keep, on device or host; "none" where none is recomputed."""
        policies = self.checkpoint_policies or "none"
        words = [policies] if isinstance(policies, str) else [word for word in policies if word != "none"]
        kinds = [word.removesuffix(ON_HOST) for word in words]
        return max(kinds, key=kinds.count, default="none")  # pyright: ignore[reportReturnType]

    @property
    def recomputed_layers(self) -> int:
        """How many layers are recomputed; 0 where one word is for all."""
        policies = self.checkpoint_policies or "none"
        return 0 if isinstance(policies, str) else sum(word != "none" for word in policies)

    @property
    def times_each_micro_batch(self) -> tuple[int, int]:
        """How often FSDP2 gathers weights, and how often it sums gradients, in every micro-batch; 0: once a step."""
        return 2 * self.reshard_after_forward, 1 * self.sync_each_batch

    @property
    def once_a_step_text(self) -> str:
        """In words, which follow others, whether weights are gathered and gradients summed once a step; "" if weights
        are gathered for each micro-batch, as gradients are then summed each time too.
        """
        gathers, sums = self.times_each_micro_batch
        if gathers:
            return ""
        return ", weights gathered once" if sums else ", weights gathered and gradients summed once"

    @property
    def text(self) -> str:
        """In words, which follow those of what layers keep, all else that a plan of memory chooses."""
        texts = [self.once_a_step_text]
        if self.offload_optimizer_states:
            texts.append(", states on the host")
        if self.offload_weights:
            texts.append(", weights on the host")
        if self.mlp_tile_tokens:
            texts.append(f", MLPs in tiles of {self.mlp_tile_tokens:,} rows")
        policies = self.checkpoint_policies or ()
        # A word is for all layers, however many there are.
        layers = self.segment_layers if isinstance(policies, str) else min(self.segment_layers, len(policies))
        if layers:
            texts.append(f", segments of {plural(layers, 'layer')}")
        return "".join(texts)

    @property
    def arithmetic(self) -> tuple[str, str]:
        """What of the form changes numbers: how frozen weights are stored, and in what layers multiply."""
        return self.frozen, self.float8

    def trained_on_host(self, *, trains_all: bool) -> bool:
        """Whether trained weights wait on the host, with their gradients and states: all but adapters."""
        return self.offload_weights and trains_all

    def states_on_host(self, *, trains_all: bool) -> bool:
        """Whether the optimizer's states wait on the host, by themselves or with trained weights."""
        return self.offload_optimizer_states or self.trained_on_host(trains_all=trains_all)

    def for_prepare(self, *, training: bool) -> "Form":
        """Return what `prepare` is asked for: without `training` nothing waits on the host, and segments are of layers
        that recompute.
        """
        form = self.form
        if form.recomputation == "none":
            form = replace(form, segment_layers=0)
        if training:
            return form
        policies = form.checkpoint_policies
        if isinstance(policies, str):
            policies = policies.removesuffix(ON_HOST)
        return replace(form, offload_weights=False, checkpoint_policies=policies)


@dataclass(frozen=True, kw_only=True)
class FixedMemory:
    """Fields of the form that are given by hand, and are not chosen; None leaves one to the choice.

    >>> FixedMemory(activation_checkpointing="selective", offload_activations=False).checkpoint_policies
    ('exchanged', 'selective')

    `activation_checkpointing` ("none", "selective" or "full") is what layers keep. `offload_activations` moves that to
    the host, or does not.
    """

    activation_checkpointing: str | None = None
    offload_activations: bool | None = None
    reshard_after_forward: bool | None = None
    sync_each_batch: bool | None = None
    offload_optimizer_states: bool | None = None
    offload_weights: bool | None = None
    mlp_tile_tokens: int | None = None
    segment_layers: int | None = None

    @property
    def checkpoint_policies(self) -> tuple[CheckpointPolicy, ...]:
        """The policies that layers may have, in the order of CHECKPOINT_POLICIES. Raises PlanError where the fields
        leave none.

        "none" and "exchanged" have no form on the host: with `offload_activations` true "none" is a choice only if
        `activation_checkpointing` is not fixed, for the layers that fit without moving. "exchanged" is a form of
        "selective".
        """
        kept = self.activation_checkpointing
        offload = self.offload_activations
        policies: list[CheckpointPolicy] = [
            word for word in CHECKPOINT_POLICIES if kept is None or word.removesuffix(ON_HOST) == kept
        ]
        if offload is not None:
            policies = [word for word in policies if ("+" in word) == offload or (word == "none" and kept is None)]
        if kept == "selective" and not offload:
            policies.append("exchanged")
        if not policies:
            raise PlanError(
                f"no policy keeps {kept!r} with offload_activations {offload}; use one of "
                f"{', '.join(CHECKPOINT_POLICIES)}"
            )
        return tuple(sorted(policies, key=CHECKPOINT_POLICIES.index))


# Fields of the form that a plan of memory chooses, besides what layers keep.
CHOSEN = tuple(field.name for field in fields(FixedMemory) if field.name in Form.__dataclass_fields__)
