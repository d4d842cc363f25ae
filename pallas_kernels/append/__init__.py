"""New rows of one stored part into its buffer, contiguous or paged, in place."""

from pallas_kernels.append.op import IMPLEMENTATIONS, append

__all__ = ["IMPLEMENTATIONS", "append"]
