"""What the seconds of a step are compared with: flops, predictions, images."""

from longspan.layout import Layout
from longspan.plan import Cost, plan_fixed
from longspan.plan.items.encoder_shape import EncoderShape
from longspan.plan.shape.model_shape import ModelShape, model_flops
from longspan.train.step_figures import StepFigures
from longspan.train.terms.encoding import EncoderTimes

TEXT = ModelShape(layers=2, weights=10**6, query_width=64, key_width=32)
SIZES = {"width": 16, "head_dim": 8, "full_layers": 3, "merge": 2}
TOWER = EncoderShape(**SIZES, block_weights=10**6, embed_weights=10**4, projector_weights=10**5)
COST = Cost(linear_seconds=0.01, attention_seconds=0.0, micro_batch_seconds=0.0)


def test_images_count() -> None:
    plan = plan_fixed([40, 24], Layout(2), cp=1, cost=COST)
    times = EncoderTimes(seconds=0.5, predicted_seconds=0.1)
    figures = StepFigures(shape=TEXT, images=TOWER, devices=2, peak=1e-3, priced_here=True)
    found = figures.step_figures(plan, 2.0, [4, 6], times)
    flops = model_flops(TEXT, [40, 24]) + TOWER.flops([4, 6])
    assert found["tflops"] == float(f"{flops / 2.0 / 2 / 1e12:.6g}") and found["mfu"] == round(flops / 4e12 / 1e-3, 6)
    assert found["encoder_share"] == 0.25 and found["predicted_encoder_share"] == round(0.1 / 0.5, 4)
    assert found["predicted_seconds"] == 0.5 and found["bound_share"] == round((plan.lower_bound_seconds + 0.1) / 2, 6)
    # without a price they leave no share of the peak
    assert "tflops" not in StepFigures(shape=TEXT, devices=2).step_figures(plan, 2.0, [4])
    assert "tflops" in StepFigures(shape=TEXT, devices=2).step_figures(plan, 2.0)
