"""Which back end a head computes on: `options.backend`, its old name `compiled`, and processors that are slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import manymax
from manymax.engine import native_library
from manymax.engine.options import HeadOptions, read_options
from manymax.errors import ArgumentError, ManymaxError
from manymax.ops import processor
from tests.heads.plain import needs_library


def loss(name: str = "sparsemax", device: str = "cpu", **options: Any) -> torch.Tensor:
    queries, vectors = torch.ones(3, 4, device=device), torch.ones(50, 4, device=device)
    function = getattr(manymax, f"linear_{name}_loss")
    return function(queries, vectors, torch.arange(3, device=device), options=options)


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The levels that native kernels are called on from here on."""
    found: list[str] = []
    real = native_library._function
    monkeypatch.setattr(native_library, "_function", lambda level, name: found.append(level) or real(level, name))
    return found


@needs_library
def test_the_back_end_is_the_one_that_was_asked_for(levels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYMAX_BACKEND", "native-plain")
    for backend, expected in (("torch", set()), ("auto", {"plain"}), ("native-plain", {"plain"})):
        levels.clear()
        loss(backend=backend)
        assert set(levels) == expected, backend
    monkeypatch.setenv("MANYMAX_BACKEND", "torch")
    levels.clear()
    loss()
    assert levels == []


@needs_library
def test_what_native_code_cannot_do_is_refused_if_demanded() -> None:
    with pytest.raises(ArgumentError, match=r"'native', which runs on a CPU alone; the device is meta"):
        loss(device="meta", backend="native")
    loss("taylor_softmax", backend="native")  # it has no native kernel, but the products of all exact members
    # A head without blocks of scores has no native kernel, and is plain torch by nature.
    head = manymax.LinearHierarchicalSoftmaxLoss
    with pytest.raises(ArgumentError, match=r"`options.backend` has no effect on this head"):
        head(4, 10, options={"backend": "native"})
    head(4, 10, options={"backend": "torch"})


@needs_library
def test_the_old_name_works_with_a_warning(levels: list[str]) -> None:
    with pytest.warns(DeprecationWarning, match=r"`options.compiled` is deprecated"):
        value = loss(compiled=True)
    assert levels
    torch.testing.assert_close(value, loss(backend="torch"))
    # As before, it has no effect on a member that has no native kernel.
    with pytest.warns(DeprecationWarning, match="Leave it out"):
        loss("taylor_softmax", compiled=True)
    with pytest.warns(DeprecationWarning, match='`backend="torch"` turns them off'):
        assert read_options({"compiled": False}) == HeadOptions()
    with pytest.raises(ArgumentError, match="contradict each other"):
        loss(compiled=True, backend="torch")


def test_without_a_library_only_a_demand_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native_library.VARIABLE, raising=False)
    monkeypatch.setattr(native_library, "missing", lambda level: "there is none.")
    native_library._resolve.cache_clear()
    try:
        loss()
        with pytest.raises(ManymaxError, match="'native', which cannot be had: there is none"):
            loss(backend="native")
    finally:
        native_library._resolve.cache_clear()


# bfloat16 products -------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A processor without instructions for bfloat16, on which its products take 26 times as long."""
    monkeypatch.delenv(processor.ALLOW_SLOW)
    monkeypatch.setattr(processor, "features", lambda: frozenset(["avx2", "fma"]))
    monkeypatch.setattr(processor, "bf16_slowdown", lambda: 26.0)
    return monkeypatch


def test_slow_products_are_refused_with_their_factor(slow: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"26 times as long as in float32 here.*`options.allow_slow`"):
        loss("softmax", matmul="bf16")
    loss("softmax", matmul="bf16", allow_slow=True)
    slow.setenv(processor.ALLOW_SLOW, "1")
    loss("softmax", matmul="bf16")


def test_products_that_are_not_slow_are_not_refused(slow: pytest.MonkeyPatch) -> None:
    processor.check_bf16(torch.device("cuda"), allow_slow=False)  # the processor has no part in it
    slow.setattr(processor, "bf16_slowdown", lambda: 1.1)  # no instructions, and yet not slower
    loss("softmax", matmul="bf16")
    slow.setattr(processor, "bf16_slowdown", lambda: pytest.fail("nothing needs to be measured"))
    for name in ("avx512_bf16", "amx_bf16", "bf16"):
        slow.setattr(processor, "features", lambda name=name: frozenset([name]))
        loss("softmax", matmul="bf16")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model name\t: A\nflags\t\t: fpu avx2 avx512_bf16\n", ("A", {"fpu", "avx2", "avx512_bf16"})),
        ("BogoMIPS\t: 50\nFeatures\t: fp asimd bf16\n", (None, {"fp", "asimd", "bf16"})),
    ],
)
def test_what_linux_tells(
    text: str, expected: tuple[str | None, set[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    assert processor.features.__wrapped__() == expected[1]
    if expected[0] is not None:
        assert processor.name.__wrapped__() == expected[0]
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")  # another system: torch may tell
    assert isinstance(processor.features.__wrapped__(), frozenset)
    assert processor.name.__wrapped__()


def test_the_slowdown_is_a_ratio_of_times() -> None:
    assert 0.01 < processor.bf16_slowdown.__wrapped__() < 1e5
