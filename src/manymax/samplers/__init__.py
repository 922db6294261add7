"""Samplers: the proposal distributions from which negatives are drawn. `SAMPLERS` is the table of all of them."""

from manymax.samplers import dns, in_batch, log_uniform, midx, mixed, popularity, two_pass, uniform
from manymax.samplers.base import Draw, FixedSampler, Sampler, SamplerEntry
from manymax.samplers.dns import DNSSampler
from manymax.samplers.in_batch import InBatchSampler
from manymax.samplers.log_uniform import LogUniformSampler
from manymax.samplers.midx import MIDXSampler
from manymax.samplers.mixed import MixedSampler
from manymax.samplers.popularity import PopularitySampler
from manymax.samplers.streaming import StreamingFrequency
from manymax.samplers.two_pass import TwoPassSampler
from manymax.samplers.uniform import UniformSampler
from manymax.table import Table

SAMPLERS: Table[SamplerEntry] = Table(
    "sampler",
    uniform.ENTRY,
    log_uniform.ENTRY,
    popularity.ENTRY,
    in_batch.ENTRY,
    mixed.ENTRY,
    dns.ENTRY,
    two_pass.ENTRY,
    midx.ENTRY,
)

__all__ = [
    "SAMPLERS",
    "DNSSampler",
    "Draw",
    "FixedSampler",
    "InBatchSampler",
    "LogUniformSampler",
    "MIDXSampler",
    "MixedSampler",
    "PopularitySampler",
    "Sampler",
    "SamplerEntry",
    "StreamingFrequency",
    "TwoPassSampler",
    "UniformSampler",
]
