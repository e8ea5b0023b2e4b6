"""The names of attention's kernels, in the order in which they are tried: without torch, which `attention/` imports."""

KERNEL_NAMES = (
    *("fa4", "cudnn", "torch_flash", "triton_blocks", "triton_flash", "triton_gathered"),
    *("cpu_flash", "reference"),
)
