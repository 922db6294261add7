"""Heads whose class vectors are split over several processes (ranks), with the losses and gradients of one machine."""

from manymax.distributed.collectives import ProcessRanks
from manymax.distributed.planning import Network, Plan, measure_network, plan, traffic
from manymax.distributed.sharded_head import ShardedHead
from manymax.distributed.sharding import even_sizes

__all__ = ["Network", "Plan", "ProcessRanks", "ShardedHead", "even_sizes", "measure_network", "plan", "traffic"]
