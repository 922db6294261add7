"""Random generators of a run: one seed, and a generator of its own for every purpose and every step.

A generator is made from (seed, name, step) wherever it is needed, and none is ever saved in a checkpoint. A resumed run
therefore draws the same numbers at each step, and drawing more for one purpose changes nothing for the others.
"""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, name: str, step: int = 0) -> int:
    """A seed below 2^63 for one purpose and step: the first 8 bytes of a SHA-256 hash, without their lowest bit.

    >>> derive(0, "shuffle") == derive(0, "shuffle", 0), derive(0, "shuffle") == derive(0, "shuffle", 1)
    (True, False)
    """
    digest = hashlib.sha256(f"{seed}/{name}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(seed: int, name: str, *, step: int = 0) -> torch.Generator:
    """A fresh generator for one purpose ("split", "init", "shuffle", "negatives", ...) and step.

    >>> torch.rand(2, generator=generator(0, "init"))
    tensor([0.3663, 0.1047])
    """
    return torch.Generator().manual_seed(derive(seed, name, step))
