"""Reading a tensor that a user names: .npy, .pt or .safetensors, never a pickle."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from manymax.errors import ArgumentError


def read_tensor(option: str, path: Path) -> Tensor:
    """The one tensor in a file; `option` is what an error names."""
    readers: dict[str, Callable[[Path], Any]] = {".npy": _read_npy, ".pt": _read_pt, ".safetensors": load_file}
    if path.suffix not in readers:
        raise ArgumentError(f"`{option}` must be a file that ends in {', '.join(readers)}; got {str(path)!r}.")
    try:
        content: Any = readers[path.suffix](path)
    except (OSError, EOFError, ValueError, TypeError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
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
