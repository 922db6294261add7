"""Class vectors split over ranks: heads whose losses and gradients are those of one machine."""

from manymax.distributed.heads import ShardedHead
from manymax.distributed.sharding import even_sizes

__all__ = ["ShardedHead", "even_sizes"]
