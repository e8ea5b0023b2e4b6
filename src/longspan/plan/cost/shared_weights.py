"""What it takes that slots share a model's weights: messages of FSDP2 and HSDP, and rows that travel to experts."""

import dataclasses
from dataclasses import dataclass

from longspan.plan.cost.cost import Cost
from longspan.plan.cost.cost_changes import CostSettings
from longspan.plan.cost.machine_figures import MachineFigures
from longspan.plan.shape.model_shape import ModelShape


@dataclass(frozen=True)
class SharedWeights:
    """The weights of a model that slots of a machine share under the settings of a run."""

    machine: MachineFigures
    shape: ModelShape
    settings: CostSettings

    def add_messages(self, cost: Cost, *, recomputed_share: float = 0.0) -> Cost:
        """Return a cost with the messages of a micro-batch: FSDP2's, and rows to experts and back.

        `recomputed_share` is that of the layers which run forward twice.
        """
        return self._add_routing(self._add_sharding(cost), recomputed_share)

    def update_seconds(self) -> float:
        """Return the seconds that end a step: of the optimizer, and of sums of gradients over copies of the shards.

        A ring over c copies brings a slot 2 (c − 1) / c of its shard's gradients, in float32. Frozen weights have no
        gradients, and in free mode `Cost.with_closing` prices the sums.
        """
        machine, settings = self.machine, self.settings
        if settings.frozen:
            return machine.update_seconds
        weights = (self._dense_weights() + self._expert_weights() / self._expert_shards()) / max(1, settings.shards)
        copies = 1 if settings.free else settings.dp_replicate
        link = machine.inside if copies * settings.shards <= machine.node_size else machine.across
        summed = weights * 4 * 2 * (copies - 1) / copies / link.gather.bytes_per_second
        return machine.update_seconds + machine.weight_update_seconds * weights + summed

    def _add_sharding(self, cost: Cost) -> Cost:
        """Return a cost with FSDP2's copies and messages in each micro-batch: a share of these always shows.

        Each of w slots gets (w − 1) / w of the weights in each gather (forward, and backward unless weights stay
        gathered), and of their gradients in the sum, which travels in float32 at least. In free mode they come once a
        step, which `Cost.with_closing` prices.
        """
        machine, settings = self.machine, self.settings
        if not settings.shards or settings.free:
            return cost
        forward = cost.passes == "forward"
        gathers, sums = 2 - (forward or settings.gathered_once), 1 - (forward or settings.frozen)
        width = settings.shards
        expert_width = width * self._expert_shards()
        sent = self._dense_weights() * (width - 1) / width
        sent += self._expert_weights() * max(0.0, expert_width - 1) / expert_width
        wire = sent * gathers * settings.bytes_per_number / self._sharding_speed("sharded_gather", width)
        wire += sent * sums * max(4, settings.bytes_per_number) / self._sharding_speed("sharded_reduce", width)
        weights = self._dense_weights() + self._expert_weights()
        shown = machine.weight_copy_seconds * weights * (gathers + sums) + machine.sharding_share * wire
        hidden = (1 - machine.sharding_share) * wire
        return dataclasses.replace(cost, micro_batch_seconds=cost.micro_batch_seconds + shown, sharding_seconds=hidden)

    def _dense_weights(self) -> float:
        """Return the weights that a rank gathers of the whole model, without experts: its share over tp ranks."""
        return (self.shape.stored_weights - self.shape.stored_experts) / self._tp

    def _expert_weights(self) -> float:
        """Return the weights of the experts that a rank gathers: those of its part of ep, which tp does not split."""
        return self.shape.stored_experts / self.settings.ep

    def _expert_shards(self) -> float:
        """Return the ranks of one slot over which FSDP2 shards a rank's experts, below 1 where slots share experts."""
        return self._tp / self.settings.ep

    @property
    def _tp(self) -> int:
        """Ranks that share a slot's weights."""
        return self.settings.weight_ranks or self.settings.tp

    def _sharding_speed(self, kind: str, width: int) -> float:
        """Return the bytes/s that each of `width` slots gets from FSDP2: of this kind if measured, else assumed."""
        machine = self.machine
        inside, across = getattr(machine.inside, kind), getattr(machine.across, kind)
        speed = inside.bytes_per_second if inside else machine.sharding_bytes_per_second
        if width <= machine.node_size:
            return speed
        # A ring of all slots crosses each boundary once, shared between the slots of a host.
        usual = machine.across.gather.bytes_per_second * machine.node_size
        return min(speed, across.bytes_per_second if across else usual)

    def _add_routing(self, cost: Cost, recomputed_share: float) -> Cost:
        """Return a cost with the exchanges in which rows go to the slots that have their experts, and come back.

        Each of the ep slots has equally many experts, and gets equally many rows from each of the others, none of them
        padding. Nothing is computed meanwhile. A layer exchanges twice forward, twice again if it is recomputed, and
        twice backward.
        """
        machine, settings, ep = self.machine, self.settings, self.settings.ep
        if ep == 1 or not self.shape.expert_layers:
            return cost
        exchanges = 2.0 if cost.passes == "forward" else 4.0 + 2.0 * recomputed_share
        neighbours = min(ep, machine.node_size)
        row_bytes = exchanges * self.shape.routed_numbers * settings.bytes_per_number
        near = row_bytes * (neighbours - 1) / ep / machine.inside.exchange.bytes_per_second
        far = row_bytes * (ep - neighbours) / ep / machine.across.exchange.bytes_per_second
        slowest = machine.inside if neighbours == ep else machine.across
        latency = exchanges * self.shape.expert_layers * slowest.exchange.latency
        return dataclasses.replace(
            cost,
            linear_seconds=cost.linear_seconds + max(near, far),
            real_row_seconds=cost.real_row_seconds + max(near, far),
            micro_batch_seconds=cost.micro_batch_seconds + latency,
        )
