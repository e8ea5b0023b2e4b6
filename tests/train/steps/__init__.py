"""Steps: loss and gradients under any plan, home and precision."""
