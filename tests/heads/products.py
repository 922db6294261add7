"""Counts what a head computes: products with the table of class vectors, the rows that were scored, and tensors made.

Operations of torch are seen below autograd, so that backward passes count too; those of native code by their functions.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manymax.engine import native

PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")


class Products(TorchDispatchMode):
    """Collects the products over `num_classes` classes, and the shapes of all float tables that are made.

    count: the products between two tables of which one side has `num_classes` rows or columns.
    rows: how many rows were multiplied, over all of these products.
    queries: the addresses of the first operands of the products of scores.
    shapes: of all float tensors that got memory of their own.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.count, self.rows = 0, 0
        self.queries: set[int] = set()
        self.shapes: set[tuple[int, ...]] = set()

        def block_scores(level: str, queries: Tensor, *more: Any) -> Tensor:
            self._add(len(queries), queries)
            return scores(level, queries, *more)

        def dense_gradients(*given: Any) -> Tensor | None:
            _, _, _, _, _, _, grad_vectors, _, wants_product, *_ = given
            scale = given[4]
            for _ in range((grad_vectors is not None) + wants_product):
                self._add(len(scale))
            return gradients(*given)

        scores, gradients = native.block_scores, native.dense_gradients
        self.patches = patch.multiple(native, block_scores=block_scores, dense_gradients=dense_gradients)

    def __enter__(self) -> Products:
        self.patches.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patches.stop()

    def _add(self, rows: int, queries: Tensor | None = None) -> None:
        self.count += 1
        self.rows += rows
        if queries is not None:
            self.queries.add(queries.untyped_storage().data_ptr())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)}
        for result in out if isinstance(out, tuple | list) else (out,):
            # Views and tensors that were changed in place share the memory of an argument.
            table = isinstance(result, Tensor) and result.is_floating_point() and not result.is_sparse
            if table and result.untyped_storage().data_ptr() not in given:
                self.shapes.add(tuple(result.shape))
        if func.overloadpacket.__name__ in PRODUCTS:
            left, right = args[-2:]
            sizes = (*left.shape[-2:], right.shape[-1])
            if self.num_classes in sizes and min(sizes) > 1:  # a vector times a table is no product of this kind
                # Scores are (n, d) (d, C), the gradient of queries (n, C) (C, d), that of class vectors (C, n) (n, d).
                rows = sizes[0] if sizes[0] != self.num_classes else sizes[1]
                self._add(rows, left if sizes[2] == self.num_classes else None)
        return out


def products_of(step: Any, num_classes: int) -> Products:
    """What a step without arguments computes."""
    with Products(num_classes) as counted:
        step()
    return counted


def leaf(values: Tensor, learned: bool) -> Tensor:
    """A copy of the values that requires a gradient, or not."""
    return values.detach().clone().requires_grad_(learned)


def backward(value: Tensor, upstream: Tensor | None = None) -> None:
    """`value.backward()`, or nothing where nothing is learned."""
    if value.requires_grad:
        value.backward(torch.ones_like(value) if upstream is None else upstream)
