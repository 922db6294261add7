"""`manymax advise`: which member to train with, what it costs and what it gives up."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from manymax import advisor
from manymax.cli import console as display
from manymax.cli.member_text import settings_text
from manymax.cli.tensors import read_tensor
from manymax.errors import ArgumentError, unknown_name
from manymax.members import BASELINE
from manymax.theory.cost import Machine, Work

ADVICE_HEADERS = ("", "member", "settings", "step", "epoch", "memory", "deviation", "k for target", "consistent")
COLUMNS_NOTE = (
    "step, epoch: time of loss and gradients, without the optimizer. deviation: bias^2 + variance against the"
    f" {BASELINE.name} loss. k for target: negatives at which the deviation falls below --target."
)


def advise(
    num_classes: Annotated[int, typer.Argument(metavar="CLASSES", help="The number of classes, C.")],
    dim: Annotated[int, typer.Option(help="Size of the queries and class vectors, d.")] = 64,
    batch: Annotated[int, typer.Option(help="Rows of a training step, N.")] = 1024,
    examples: Annotated[
        int | None, typer.Option(help="Training examples of an epoch; needed to predict the time of an epoch.")
    ] = None,
    positives: Annotated[float, typer.Option(help="Labels per example, on average.")] = 1.0,
    metric: Annotated[
        str, typer.Option(help=f"What the model is judged by: {', '.join(advisor.MULTILABEL_BY_METRIC)}.")
    ] = "ndcg",
    max_memory: Annotated[float | None, typer.Option(metavar="GB", help="Most memory that the head may take.")] = None,
    max_step_seconds: Annotated[float | None, typer.Option(help="Most seconds that a step may take.")] = None,
    max_epoch_seconds: Annotated[float | None, typer.Option(help="Most seconds that an epoch may take.")] = None,
    num_negatives: Annotated[
        int | None, typer.Option(help="k, negatives per row; if left out, as many as --target takes.")
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Draw negatives once for all rows of a batch, not for each row.")
    ] = False,
    target: Annotated[
        float, typer.Option(help=f"Deviation from {BASELINE.name} (bias^2 + variance, in nats^2) that is small enough.")
    ] = advisor.TARGET,
    scores: Annotated[
        Path | None,
        typer.Option(help="Scores of your model, shape (rows, classes), in a .npy, .pt or .safetensors file."),
    ] = None,
    spread: Annotated[
        float, typer.Option(help="Standard deviation of the made-up scores that are used without --scores.")
    ] = advisor.ASSUMED_SPREAD,
    log_q: Annotated[
        Path | None,
        typer.Option(help="log q of a proposal, shape (classes,), in such a file; compared with the uniform one."),
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(help="File with the output of an earlier --json: take its machine instead of measuring this one."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the ranking, the machine and the assumptions as JSON.")
    ] = False,
) -> None:
    """Rank the losses for your situation, and say why.

    Use it before training, when you know the number of classes and your limits but not which loss to take. It measures
    the speed of this machine for a few seconds, predicts time, memory and deviation from exact softmax, rejects what
    does not fit, and says what each loss gives up. Scores of your own model (--scores) make the predicted deviations
    more reliable.

    \b
    Examples:
      manymax advise 40981 --examples 1027370 --positives 27
      manymax advise 1000000 --max-step-seconds 0.1 --metric recall
      manymax advise 3307 --scores scores.npy --json
    """
    advice = advisor.advise(
        num_classes,
        dim=dim,
        batch=batch,
        examples=examples,
        positives=positives,
        metric=metric,
        max_memory=None if max_memory is None else 1e9 * max_memory,
        max_step_seconds=max_step_seconds,
        max_epoch_seconds=max_epoch_seconds,
        num_negatives=num_negatives,
        shared=shared,
        target=target,
        machine=None if machine is None else read_machine(machine),
        scores=None if scores is None else read_tensor("--scores", scores),
        spread=spread,
        log_q=None if log_q is None else read_tensor("--log-q", log_q),
    )
    if json:
        display.put_json(advice.as_dict())
        return
    console = display.open_console()
    if advice.ranked:
        ranking = (_row(n, choice) for n, choice in enumerate(advice.ranked, 1))
        display.put(console, display.table(ADVICE_HEADERS, ranking))
        display.put(console, COLUMNS_NOTE)
    else:
        display.put(console, "No member fits the limits.")
    for title, rows in _sections(advice):
        console.print(f"\n{title}")
        display.put(console, display.pairs(rows))


def _row(number: int, choice: advisor.Choice) -> list[str]:
    return [
        str(number),
        choice.member,
        _settings(choice),
        _seconds(choice.step_seconds),
        "-" if choice.epoch_seconds is None else _seconds(choice.epoch_seconds),
        f"{choice.memory / 1e9:.3g} GB",
        "unknown" if choice.deviation is None else f"{choice.deviation:.2g}",
        "-" if choice.needed_negatives is None else f"{choice.needed_negatives:,}",
        "yes" if choice.consistent else "no",
    ]


def _settings(choice: advisor.Choice) -> str:
    proposal = {} if choice.proposal is None else {"proposal": choice.proposal}
    return settings_text(choice.settings | proposal)


def _seconds(seconds: float) -> str:
    """A time in the unit that keeps the number short: ms, s, min or h.

    >>> _seconds(0.0123), _seconds(75.0), _seconds(7200.0)
    ('12.3 ms', '75 s', '2 h')
    """
    for unit, size in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * size or (unit == "s" and seconds >= 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"


def _sections(advice: advisor.Advice) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The parts of the output below the table: (title, [(name, text), ...])."""
    if advice.ranked:
        yield "Why, and what each gives up", [line for choice in advice.ranked for line in _reasons(choice)]
    if advice.rejected:
        yield "Rejected", [(f"{c.member} ({_settings(c)})", str(c.rejected)) for c in advice.rejected]
    if advice.assumptions:
        yield "Assumed", [("", text) for text in advice.assumptions]


def _reasons(choice: advisor.Choice) -> Iterator[tuple[str, str]]:
    yield choice.member, choice.why
    yield from (("", f"gives up {text}") for text in choice.gives_up)


def read_machine(path: Path) -> Machine:
    """Read the speed of a machine from a JSON file.

    The file holds the fields of `Machine` (seconds per unit of each kind of work), either at its top or under the key
    "machine", as in the output of `--json`.
    """
    try:
        content = json_format.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json_format.JSONDecodeError) as error:
        raise ArgumentError(f"`--machine` must be a readable JSON file; {str(path)!r} is not: {error}.") from error
    found = content.get("machine", content) if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ArgumentError(f"`--machine` must hold an object of seconds by kind of work; got {str(path)!r}.")
    known = [f.name for f in fields(Work)]
    for name in found:
        if name not in (*known, "native"):  # a file without `native` is older than the native back end
            raise unknown_name("kind of work", name, known)
    machine = Machine(**found)
    if missing := [name for name in known if name not in found]:
        raise ArgumentError(f"`--machine` must give the seconds of every kind of work; {', '.join(missing)} missing.")
    if not machine.flops > 0:
        raise ArgumentError("`--machine` must have `flops` above 0: nothing is done in no time.")
    return machine
