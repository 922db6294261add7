"""The library works with a torch that no longer has the private names that ops/checks.py asks for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import manymax

pytestmark = pytest.mark.slow  # a process of its own

# torch itself needs these modules: only imports by manymax fail
WITHOUT_PRIVATE_NAMES = """
import builtins

PRIVATE = ("torch._C._functorch", "torch._subclasses.fake_tensor")
original_import = builtins.__import__
refused = set()

def refusing_import(name, globals=None, *args, **kwargs):
    if name in PRIVATE and globals is not None and globals.get("__name__", "").startswith("manymax"):
        refused.add(name)
        raise ImportError(name)
    return original_import(name, globals, *args, **kwargs)

builtins.__import__ = refusing_import

import warnings

import torch

import manymax
from manymax.ops.checks import learned, visible

assert refused == set(PRIVATE), refused
warnings.simplefilter("error")
"""

VALUES = """
scores = torch.tensor([[2.0, 1.5, -1.0], [0.5, 0.0, 0.25]], requires_grad=True)
target = torch.tensor([1, 0])
for loss in (manymax.softmax_loss, manymax.sparsemax_loss):
    value = loss(scores, target)
    (gradient,) = torch.autograd.grad(value, scores)
    print(value.item(), *gradient.flatten().tolist())
"""

CHECKS_OF_VALUES = """
for loss in (manymax.softmax_loss, manymax.sparsemax_loss):
    try:
        loss(torch.tensor([[torch.nan, 1.0]]), torch.tensor([0]))
    except manymax.ArgumentError as error:
        print("nan" in str(error))
"""

TRANSFORMS = """
from torch._subclasses import FakeTensorMode

seen = []

def look(x):
    seen.append((visible(x), learned(x)))
    return manymax.sparsemax_loss(x, torch.tensor(0))

x = torch.tensor([[2.0, 1.5, -1.0]])
torch.vmap(look)(x)
torch.func.grad(look)(x[0])
assert seen == [(False, True), (False, True)], seen
assert (visible(x), learned(x)) == (True, False)
with FakeTensorMode():
    fake = torch.zeros(2, 3)
    assert (visible(fake), learned(fake)) == (False, False)
    print(tuple(manymax.softmax_loss(fake, torch.zeros(2, dtype=torch.long), reduction="none").shape))
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """The lines that the scripts above print, all in one process, because importing torch takes most of the time."""
    command = [sys.executable, "-c", WITHOUT_PRIVATE_NAMES + VALUES + CHECKS_OF_VALUES + TRANSFORMS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_losses_and_gradients_are_those_of_a_torch_with_the_names(printed: list[str]) -> None:
    scores = torch.tensor([[2.0, 1.5, -1.0], [0.5, 0.0, 0.25]], requires_grad=True)
    for line, loss in zip(printed[:2], (manymax.softmax_loss, manymax.sparsemax_loss), strict=True):
        value = loss(scores, torch.tensor([1, 0]))
        (gradient,) = torch.autograd.grad(value, scores)
        assert [float(word) for word in line.split()] == pytest.approx([value.item(), *gradient.flatten().tolist()])


def test_values_are_still_checked(printed: list[str]) -> None:
    assert printed[2:4] == ["True", "True"]


def test_transforms_and_fake_tensors_are_still_recognised(printed: list[str]) -> None:
    assert printed[4:] == ["(2,)"]
