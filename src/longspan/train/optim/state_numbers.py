"""How many numbers an optimizer keeps for each weight. torch is imported only for those that must be counted."""

from longspan.config.dtypes import DTYPE_BYTES
from longspan.config.sections import OptimizerSection
from longspan.plan.memory.settings import known_state_numbers


def optimizer_state_numbers(section: OptimizerSection, *, lora: bool = False, dtype: str = "float32") -> float:
    """Return how many numbers of state the optimizer keeps for each weight, counted on a small matrix if need be.

    With `lora` the weights are those of an adapter, in float32; otherwise they are in `dtype`.
    """
    if section.class_ == "sgd" and any(argument.startswith("momentum") for argument in section.arguments):
        return 1.0
    known_numbers = known_state_numbers(section.class_, section.moments, DTYPE_BYTES["float32" if lora else dtype])
    if known_numbers is not None:
        return known_numbers
    import torch

    from longspan.model.load import torch_dtype
    from longspan.train.optim.optimizer import OptimizerChoice

    matrix = torch.nn.Parameter(torch.zeros(128, 128, dtype=torch_dtype("float32" if lora else dtype)))
    matrix.grad = torch.zeros_like(matrix)
    optimizer = OptimizerChoice.from_section(section).build([matrix])
    optimizer.step()
    size = sum(x.nbytes for x in optimizer.state[matrix].values() if isinstance(x, torch.Tensor))
    return round(size / matrix.nbytes, 3)  # rounded: the count of steps does not show
