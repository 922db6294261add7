"""Sparsemax of a block of scores: entmax at alpha = 2."""

from manymax.engine.blocks import Kernel
from manymax.members.entmax.kernel import block_entmax
from manymax.members.sparsemax.loss import omega


def sparsemax_kernel() -> Kernel:
    """The kernel of the sparsemax loss.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_sparsemax_loss(input, vectors, torch.tensor([1]))
        tensor(0.5625)
    """
    return Kernel(block_entmax(2.0), omega=omega)
