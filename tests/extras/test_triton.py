"""The Triton kernels on a machine without a GPU: their values, interpreted; what they need on devices, compiled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from manymax import FAMILY
from tests.contracts.test_devices import run_fake
from tests.contracts.test_keywords import CASES, Problem

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: `pip install --no-deps triton`"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton"),
]
# Tests of interpreted_kernels.py that one process runs: those with this word in their names.
GROUPS = ("softmax", "sparsemax", "entmax", "rankmax", "sl_at_k", "talos", "psl", "bsl", "kernel", "alpha")


def interpreted(*arguments: str, **environment: str) -> None:
    """Run pytest in a process whose Triton interprets kernels."""
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize("group", GROUPS)
def test_values_and_gradients(group: str) -> None:
    interpreted("tests/extras/interpreted_kernels.py", "-m", "extras", "-k", group)


def test_ranks_that_share_the_classes() -> None:
    """Two of them; label smoothing counts once, not once per rank."""
    chosen = "test_every_option and 2-Softmax"
    given = {"MANYMAX_BACKEND": "triton"}
    interpreted("tests/distributed/test_sharded.py", "-k", chosen, "-W", "ignore::RuntimeWarning", **given)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax", "rankmax", "sl_at_k", "talos", "psl", "bsl"])
def test_no_launch_makes_the_host_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What surrounds the kernels, with fake tensors on "cuda": they raise where a value is asked for."""
    from manymax.engine import triton_entries
    from manymax.members.entmax import kernel_triton as entmax
    from manymax.members.psl import kernel_triton as psl
    from manymax.members.rankmax import kernel_triton as rankmax
    from manymax.members.softmax import kernel_triton as softmax

    launched: list[str] = []
    for module in (triton_entries, entmax, psl, rankmax, softmax):
        monkeypatch.setattr(module, "launch", lambda kernel, *more, **constants: launched.append(kernel.fn.__name__))
    member = FAMILY[name]
    calls = [Problem().keywords(given) for given, needed in CASES.values() if not needed or getattr(member, needed)]
    for keywords in [*calls, {"stats": ("argmax", *member.statistics)}]:
        run_fake(member, options={"backend": "triton"}, **keywords)
        assert launched, keywords
        launched.clear()


# Compiled for devices that are not there ---------------------------------------------------------


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The benchmark that compiles, with a cache of its own."""
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    from benchmarks import gpu

    return gpu


@pytest.fixture(scope="module")
def found(gpu: Any) -> list[dict[str, Any]]:
    """What the interpreter counted, and how the kernels are specialised."""
    counted: list[dict[str, Any]] = gpu.counted()
    return counted


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_fits_on_every_device(gpu: Any, found: list[dict[str, Any]], target: str) -> None:
    chosen = next(one for one in gpu.TARGETS if one[0] == target)
    for one in gpu.specialisations(found):
        build = gpu.compile_for(gpu.kernel_of(one), one["signature"], one["constants"], chosen)
        assert build.fits, (target, one["kernel"], one["constants"], build[:3])


def test_a_kernel_that_spills_is_found(gpu: Any, found: list[dict[str, Any]]) -> None:
    """Sixteen times as many numbers in each thread as usual."""
    one = next(one for one in gpu.specialisations(found) if one["kernel"] == "softmax_rows")
    for target in gpu.TARGETS:
        # An MI300 has 512 registers for a thread, and fewer numbers in each: 64 threads are a warp.
        constants = one["constants"] | {"BLOCK": 1 << (13 if target[1] == "cuda" else 15)}
        build = gpu.compile_for(gpu.kernel_of(one), one["signature"], constants, target)
        assert build.spilled > 0, target
        assert not build.fits


def test_offsets_of_rows_have_64_bits(gpu: Any, found: list[dict[str, Any]]) -> None:
    """In the code that is the same for all devices: the number of a row is widened before it is multiplied."""
    for one in gpu.specialisations(found):
        build = gpu.compile_for(gpu.kernel_of(one), one["signature"], one["constants"], gpu.TARGETS[0])
        assert "arith.extsi" in build.ttir
        products = [line for line in build.ttir.splitlines() if "arith.muli" in line]
        assert products
        # No offset of a row is a 32-bit product: such a one comes from the number of the program. Times a constant that
        # is the place where a tile begins, among rows or classes, whose number has 31 bits.
        constants = set(re.findall(r"(%\w+) = arith.constant ", build.ttir))
        for line in products:
            begins = constants & set(re.findall(r"%\w+", line.partition("arith.muli")[2]))
            assert ": i64" in line or "tensor<" in line or begins, (one["kernel"], line)


def test_the_page_says_what_is_found(gpu: Any, found: list[dict[str, Any]]) -> None:
    text = gpu.PAGE.read_text(encoding="utf-8")
    assert text.startswith("Nothing on this page was timed")
    builds = list(gpu.compiled(found))
    assert gpu.page(found, builds) == text, "run `python benchmarks/gpu.py`"


def test_traffic_is_below_that_of_plain_torch(found: list[dict[str, Any]]) -> None:
    for case in found:
        own = [launch for launch in case["launches"] if "triton_entries" not in launch["module"]]
        ours = sum(launch["read"] + launch["written"] for launch in own)
        assert 0 < ours < case["torch"]["read"] + case["torch"]["written"], json.dumps(case)[:500]
