"""What the seconds of a step are compared with: the model's FLOPs, the devices' peak, and the plan's own prediction.

Everything follows from the plan's integers and the host's clock: no figure makes a rank wait for its device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from longspan.comm import World
from longspan.config.sections import RunConfig
from longspan.errors import PlanError
from longspan.model.execution import model_execution
from longspan.model.marks import adapter_of_prepared_model
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.plan import Cost, Plan
from longspan.plan.cost.machine import Machine
from longspan.plan.shape.model_shape import ModelShape, model_flops, peak_tflops

# Models with images alone need these types.
if TYPE_CHECKING:
    from longspan.plan.items.encoder_shape import EncoderShape, Trained
    from longspan.train.terms.encoding import EncoderTimes


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """A model's FLOPs on so many devices; `peak` in TFLOP/s of each, None where it is not known.

    `shape` is None where the configuration gives no FLOPs (`uncounted`: why); `trains_all`: not adapters alone.
    `images` is the tower and projector, `trained` their trained part. `priced_here`: plans are priced for these
    devices.
    """

    shape: ModelShape | None
    devices: int
    trains_all: bool = True
    images: "EncoderShape | None" = None
    trained: "Trained" = "all"
    peak: float | None = None
    priced_here: bool = False
    uncounted: str = ""

    def step_figures(
        self, plan: Plan, seconds: float, images: Sequence[int] = (), encoders: "EncoderTimes | None" = None
    ) -> dict[str, float]:
        """Return figures of one step of this plan that took `seconds`, for its row of metrics.

        `tflops` of each device and `mfu` (its share of the peak) count the model's FLOPs and those of `images`, the
        rows of each image. `predicted_seconds` is the plan's, `bound_share` its lower bound as a share of `seconds`;
        both only where plans are priced for these devices. `encoders` add `encoder_share` of the step's time, as
        measured and as predicted.
        """
        figures = dict[str, float]()
        predicted_encoder_seconds = encoders.predicted_seconds if encoders else 0.0
        if encoders is not None:
            figures["encoder_share"] = round(encoders.seconds / seconds, 4)
            figures["predicted_encoder_share"] = round(
                predicted_encoder_seconds / (predicted_encoder_seconds + plan.predicted_seconds), 4
            )
        if self.shape is not None and not (images and self.images is None):
            flops = model_flops(self.shape, plan.lengths, trains_all=self.trains_all, bases=plan.bases)
            flops += self.images.flops(images, trained=self.trained) if self.images else 0
            tflops = flops / seconds / self.devices / 1e12
            figures["tflops"] = float(f"{tflops:.6g}")
            if self.peak is not None:
                figures["mfu"] = round(tflops / self.peak, 6)
        if self.priced_here:
            figures["predicted_seconds"] = round(plan.predicted_seconds + predicted_encoder_seconds, 6)
            figures["bound_share"] = round((plan.lower_bound_seconds + predicted_encoder_seconds) / seconds, 6)
        return figures


def make_step_figures(config: RunConfig, model: nn.Module, world: World, cost: Cost) -> StepFigures:
    """Make the figures of a run's prepared model on this world's devices; `cost` is what its plans are priced by."""
    device = world_device_name(world)
    shape = None
    images = None
    uncounted = ""
    # the model of a run has one encoder at most
    encoder = next(iter(model.encoders.values()), None) if isinstance(model, MultimodalModel) else None
    trained: Trained = "all"
    try:
        shape = ModelShape.of(model.config, mtp_layers=config.mtp.num_layers)
        if encoder is not None:
            from longspan.model.multimodal.image_modules import find_trained_part
            from longspan.plan.items.encoder_shape import EncoderShape

            trained = find_trained_part(encoder)
            images = EncoderShape.of(model.config)
    except PlanError as error:
        uncounted = str(error)
    dtype = str(model_execution(model).compute_dtype).removeprefix("torch.")
    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
        dtype = "tensorfloat32"
    # longspan has prices of H200s; those of other devices come from a file of the user's (run.machine)
    is_known_machine = "H200" in device and cost.source == Machine.known("H200").source
    return StepFigures(
        shape=shape,
        images=images,
        trained=trained,
        trains_all=adapter_of_prepared_model(model) is None,
        devices=len(world.home.ranks),
        peak=peak_tflops(device, dtype),
        priced_here=is_known_machine or bool(config.run.machine),
        uncounted=uncounted,
    )


def world_device_name(world: World) -> str:
    """Return the name of this rank's GPU as CUDA has it, or "CPU"."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return "CPU"
