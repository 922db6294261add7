"""Several processes (ranks): class vectors that are split over them, and row-sparse gradients averaged over them."""

from manymax.distributed.collectives import ProcessRanks
from manymax.distributed.planning import Network, Plan, measure_network, plan, traffic
from manymax.distributed.sharded_head import ShardedHead
from manymax.distributed.sharding import even_sizes
from manymax.distributed.sparse_gradients import RowSparseGradients

__all__ = [
    "Network",
    "Plan",
    "ProcessRanks",
    "RowSparseGradients",
    "ShardedHead",
    "even_sizes",
    "measure_network",
    "plan",
    "traffic",
]
