"""Read a tensor from a file named on the command line.

The formats are .npy, .pt and .safetensors. Pickled code is never run: a file may come from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from manymax.errors import ArgumentError


def read_tensor(option: str, path: Path) -> Tensor:
    """Read the one tensor that the file at `path` holds; error messages name the command-line `option`.

    Floats of one byte (float8) become float32, because most torch operations do not know them.
    """
    readers: dict[str, Callable[[Path], Any]] = {".npy": _read_npy, ".pt": _read_pt, ".safetensors": load_file}
    if path.suffix not in readers:
        raise ArgumentError(f"`{option}` must be a file that ends in {', '.join(readers)}; got {str(path)!r}.")
    try:
        content: Any = readers[path.suffix](path)
    except Exception as error:  # of every kind: numpy alone raises five where a few bits of a header are wrong
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ArgumentError(f"`{option}` cannot be read from {str(path)!r}: {reason[0]}") from error
    tensors = list(content.values()) if isinstance(content, dict) else [content]
    if len(tensors) != 1 or not isinstance(tensors[0], Tensor):
        raise ArgumentError(f"`{option}` must be a file with one tensor; {str(path)!r} has {len(tensors)} entries.")
    if tensors[0].layout != torch.strided:
        raise ArgumentError(
            f"`{option}` must be dense; {str(path)!r} is {tensors[0].layout}. Save it with `.to_dense()`."
        )
    return tensors[0].float() if tensors[0].is_floating_point() and tensors[0].itemsize < 2 else tensors[0]


def _read_npy(path: Path) -> Tensor:
    return torch.from_numpy(np.load(path, allow_pickle=False))


def _read_pt(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)
