"""The native matrix products against torch's in float64: scores with the maxima of their groups, and both gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from manymax.engine import native
from manymax.engine.block_loop import padded_length
from manymax.engine.native_library import find_level, levels_here

LEVELS = [level for level in levels_here() if find_level(level).products]
DTYPES = {"float64": torch.float64, "float32": torch.float32}

pytestmark = pytest.mark.skipif(not LEVELS, reason="no level of the native library has products here")
every_level = pytest.mark.parametrize("level", LEVELS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)

# Around the sizes at which the code changes its way: 6 rows, registers of 4 to 16 numbers, panels of up to 64, groups
# of 64 classes, tiles of 128 classes and 256 rows.
NUM_ROWS = st.sampled_from([1, 5, 6, 7, 24, 257, 300])
NUM_CLASSES = st.sampled_from([1, 3, 63, 64, 65, 127, 129, 1000, 2500])
DIMS = st.sampled_from([1, 2, 3, 7, 16, 17, 32, 40, 64, 65, 100, 130])


def make(n: int, num_classes: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (n, d), class vectors (C, d) and a bias (C,) that masks every seventh class."""
    rng = torch.Generator().manual_seed(n + 1000 * num_classes + d)
    queries, vectors = (torch.randn(size, d, generator=rng).to(dtype) for size in (n, num_classes))
    bias = torch.randn(num_classes, generator=rng).to(dtype)
    bias[3::7] = -torch.inf
    return queries, vectors, bias


def score(level: str, queries: Tensor, vectors: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scores with their padding, and the maxima of groups."""
    out = queries.new_full((len(queries), padded_length(len(vectors))), 7.0)
    return out, native.block_scores(level, queries, vectors, bias, out)


def close(found: Tensor, expected: Tensor, size: float) -> None:
    """Equal up to the rounding of a sum of products whose absolute values sum to `size`."""
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=8 * torch.finfo(found.dtype).eps * max(1.0, size))


@every_level
@every_dtype
@given(n=NUM_ROWS, num_classes=NUM_CLASSES, d=DIMS, biased=st.booleans())
@settings(max_examples=40)
def test_scores(level: str, dtype: torch.dtype, n: int, num_classes: int, d: int, biased: bool) -> None:
    queries, vectors, bias = make(n, num_classes, d, dtype)
    found, tops = score(level, queries, vectors, bias if biased else None)
    expected = queries.double() @ vectors.double().T + (bias.double() if biased else 0)
    close(found[:, :num_classes], expected, float((queries.abs() @ vectors.abs().T).max()))
    assert (found[:, num_classes:] == -torch.inf).all()
    groups = [part.amax(1) for part in found.split(native.GROUP, 1)]
    assert torch.equal(tops, torch.stack(groups, 1))


@every_level
@every_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_found(level: str, dtype: torch.dtype, value: float) -> None:
    """The maximum of a group with nan is +inf, whatever is before or after it: `Row::scan` then looks at the scores."""
    queries, vectors, _ = make(7, 200, 5, dtype)
    for place in (0, 64 + 17, 127, 199):
        bias = torch.zeros(200, dtype=dtype)
        bias[place] = value
        found, tops = score(level, queries, vectors, bias)
        torch.testing.assert_close(found[:, place], torch.full((7,), value, dtype=dtype), equal_nan=True)
        assert ((tops == torch.inf).sum(1) == (value != -torch.inf)).all()
        assert not tops.isnan().any()


@every_level
@every_dtype
@given(n=NUM_ROWS, num_classes=st.sampled_from([300, 1000, 1025, 2500]), d=DIMS, wants=st.tuples(*[st.booleans()] * 3))
@settings(max_examples=40)
@example(n=300, num_classes=2500, d=65, wants=(True, True, True))
def test_gradients(
    level: str, dtype: torch.dtype, n: int, num_classes: int, d: int, wants: tuple[bool, bool, bool]
) -> None:
    queries, vectors, _ = make(n, num_classes, d, dtype)
    table = torch.randn(n, padded_length(num_classes), generator=torch.Generator().manual_seed(1)).to(dtype)
    g, scale = table[:, :num_classes].double(), torch.linspace(-1, 1, n).to(dtype)
    given_vectors, given_bias = vectors.clone(), scale.new_ones(num_classes)
    if native.gradient_chunks(num_classes, d) == 0:
        return
    grad_vectors, grad_bias = given_vectors if wants[1] else None, given_bias if wants[2] else None
    places = torch.randperm(n, generator=torch.Generator().manual_seed(2)) if d % 2 else None
    given_table = table if places is None else torch.empty_like(table).index_copy_(0, places, table)
    found = native.dense_gradients(
        level, given_table, places, vectors, scale, queries if wants[1] else None, grad_vectors, grad_bias, wants[0]
    )
    assert (found is not None) == wants[0]
    if found is not None:
        close(found, g @ vectors.double(), float((g.abs() @ vectors.double().abs()).max()))
    added = vectors.double() + g.T @ queries.double() * wants[1]
    close(given_vectors, added, float((g.abs().T @ queries.double().abs()).max()))
    close(given_bias, 1 + g.T @ scale.double() * wants[2], float(g.abs().sum(0).max()))


@every_level
def test_the_number_of_threads_changes_no_bit(level: str) -> None:
    queries, vectors, bias = make(50, 3000, 40, torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            scores, tops = score(level, queries, vectors, bias)
            sums = torch.zeros_like(vectors), torch.zeros_like(bias)
            scale = torch.ones(50)
            table = scores.nan_to_num(neginf=0)
            product = native.dense_gradients(level, table, None, vectors, scale, queries, *sums, True)
            assert product is not None
            results.append([scores, tops, product, *sums])
    finally:
        torch.set_num_threads(threads)
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


def test_where_torch_multiplies() -> None:
    """Code without long registers, tensors that are not contiguous, and two dtypes."""
    vectors = torch.zeros(8, 4)
    assert native.multiplies(LEVELS[-1], vectors, vectors)
    assert not native.multiplies(None, vectors)
    assert not native.multiplies("plain", vectors)
    assert not native.multiplies(LEVELS[-1], torch.zeros(4, 8).T)
    assert not native.multiplies(LEVELS[-1], vectors, vectors.double())
    assert native.gradient_chunks(100, 64) == 0
    assert native.gradient_chunks(100_000, 64) == native.CHUNKS
