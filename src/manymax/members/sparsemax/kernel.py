"""Sparsemax of a block of scores: entmax at alpha = 2."""

from manymax.engine.blocks import Kernel
from manymax.members.entmax.filter import rule_out_below
from manymax.members.entmax.kernel import block_entmax, row_by_row
from manymax.members.sparsemax.loss import omega


def sparsemax_kernel() -> Kernel:
    """The kernel of the sparsemax loss.

    Where the support is small the gradient touches only its classes, so that one of the three matmuls of a dense head
    is left.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_sparsemax_loss(input, vectors, torch.tensor([1]))
        tensor(0.5625)
    """
    # Entmax at alpha = 2 takes the branches without powers (p = u, and the slope of sum p is the size of the support),
    # here and in kernel.cpp, so that a kernel of its own would save nothing. Only Omega is sparsemax's: that of entmax
    # is the same number, computed through logarithms.
    rule_out = rule_out_below(2.0)
    return Kernel(block_entmax(2.0), omega=omega, undoes_cap=row_by_row, rule_out=rule_out, triton="sparsemax")
