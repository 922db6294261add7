"""The words of docs/gpu.md, which gpu.py writes."""

from __future__ import annotations

INTRODUCTION = """Nothing on this page was timed: it was made on a machine without a GPU.

# Kernels for GPUs

On a GPU, members with Triton kernels go over a block of scores in one or two launches, where plain torch takes dozens.
Builds of torch for CUDA and ROCm bring Triton along; `pip install 'manymax[gpu]'` makes sure of it. `options.backend`
says what is used: "auto", the default, is Triton on a GPU; "triton" is an error where it cannot serve; "torch" is plain
torch. Before a kernel serves on a device for the first time in a process it is compared with plain torch there, on a
small case; one that differs, or does not compile, is not used, and a warning says so.

In rows of a sparse member the support decides how a gradient is kept: as a list of entries where one class in 16 or
fewer has a probability, and in place of the scores otherwise. The device decides, row by row, and the host does not
wait to hear of it.

With a GPU at hand, `manymax gpu-check --json gpu.json` compares the values of all kernels with float64 there, times
steps beside other ways to compute them, and writes a file to attach to an issue.

What follows was counted and compiled, by `python benchmarks/gpu.py`."""

TRAFFIC = """## Bytes per score

Bytes of the table of scores, and of what goes with it, that one step reads and writes, per score: in Triton counted at
every load and store while the kernels are interpreted, in plain torch from the sizes of what its operations take and
return, on the way that it takes on a GPU. The two or three matrix products of a step are left out, and so are the
kernels that take their place where rows may be lists of entries. The lower bound is for a kernel that gets the scores
from a product before it: each is read once, and a dense gradient is written once. Counted are all reads; those of one
row by one program, one soon after the other, may come from a cache."""

RESOURCES = """## Registers and shared memory

Of every specialisation that the losses above need, compiled by Triton {version} for NVIDIA's Ampere (sm_80), Hopper
(sm_90) and Blackwell (sm_100) and for AMD's MI300 (gfx942), with {warps} warps per program. Registers are per thread;
spilled are bytes, on AMD registers, that did not fit into them and went to slow memory; shared memory is in bytes. The
length of a row is a run-time argument: no specialisation depends on it."""
