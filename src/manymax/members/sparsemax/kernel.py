"""Sparsemax of a block of scores: entmax at alpha = 2."""

from manymax.engine.blocks import Kernel
from manymax.members.entmax.kernel import block_entmax
from manymax.members.sparsemax.loss import omega


def sparsemax_kernel() -> Kernel:
    """The kernel of the sparsemax loss."""
    return Kernel(block_entmax(2.0), omega=omega)
