"""Causal depthwise convolutions over a rank's own runs of rows."""

from longspan.ssm.kernels.convolutions.call import Before, Convolution, ConvolutionKernel, FirstRows, Gradients
from longspan.ssm.kernels.convolutions.table import choose_convolution

__all__ = ["Before", "Convolution", "ConvolutionKernel", "FirstRows", "Gradients", "choose_convolution"]
