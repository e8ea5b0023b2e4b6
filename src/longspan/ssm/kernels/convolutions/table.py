"""The kernels of causal convolutions: the first that can do one is used, but for one that has to be asked for."""

from collections.abc import Sequence

from torch import Tensor

from longspan.ssm.kernels.asked import TORCH_ALONE, check_names, refuse
from longspan.ssm.kernels.convolutions.by_causal_conv1d import PACKAGE_CONVOLUTION
from longspan.ssm.kernels.convolutions.by_fla import FLA_CONVOLUTION
from longspan.ssm.kernels.convolutions.by_torch import TORCH_CONVOLUTION
from longspan.ssm.kernels.convolutions.call import ConvolutionKernel


def choose_convolution(x: Tensor, weight: Tensor, asked: Sequence[str] = ()) -> ConvolutionKernel:
    """The kernel for rows x (T, C) and weight (C, W). Raises LayoutError where the one asked for cannot, or is none."""
    check_names(asked)
    if TORCH_ALONE in asked:
        return TORCH_CONVOLUTION
    if PACKAGE_CONVOLUTION.name in asked:
        refuse(PACKAGE_CONVOLUTION.name, PACKAGE_CONVOLUTION.lacks(x, weight))
        return PACKAGE_CONVOLUTION
    return TORCH_CONVOLUTION if FLA_CONVOLUTION.lacks(x, weight) else FLA_CONVOLUTION
