"""`manymax advise`: which member to train with, what it costs and what it gives up."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from manymax import advisor
from manymax.cli import console as look
from manymax.cli.member_text import settings_text
from manymax.cli.tensors import read_tensor
from manymax.errors import ArgumentError, unknown_name
from manymax.theory.cost import Machine, Work

HEADINGS = ("", "member", "settings", "step", "epoch", "memory", "deviation", "k for target", "consistent")


def advise(
    num_classes: Annotated[int, typer.Argument(metavar="CLASSES", help="The number of classes, C.")],
    dim: Annotated[int, typer.Option(help="Size of queries and class vectors, d.")] = 64,
    batch: Annotated[int, typer.Option(help="Rows of a step, N.")] = 1024,
    examples: Annotated[int | None, typer.Option(help="Examples of an epoch.")] = None,
    positives: Annotated[float, typer.Option(help="Labels of an example, on average.")] = 1.0,
    metric: Annotated[str, typer.Option(help=f"What matters: {', '.join(advisor.MULTILABEL_BY_METRIC)}.")] = "ndcg",
    max_memory: Annotated[float | None, typer.Option(metavar="GB", help="Memory that the head may take.")] = None,
    max_step_seconds: Annotated[float | None, typer.Option(help="Time that a step may take.")] = None,
    max_epoch_seconds: Annotated[float | None, typer.Option(help="Time that an epoch may take.")] = None,
    num_negatives: Annotated[int | None, typer.Option(help="k; left out, what the target takes.")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="Draw negatives once for all rows.")] = False,
    target: Annotated[float, typer.Option(help="Total deviation that counts as none, in nats^2.")] = advisor.TARGET,
    scores: Annotated[
        Path | None, typer.Option(help="Scores of a model, (rows, classes): .npy, .pt, .safetensors.")
    ] = None,
    spread: Annotated[
        float, typer.Option(help="Spread of made-up scores where none are given.")
    ] = advisor.ASSUMED_SPREAD,
    log_q: Annotated[Path | None, typer.Option(help="log q of a proposal, (classes,): the same kinds of file.")] = None,
    machine: Annotated[
        Path | None, typer.Option(help="The `machine` of an earlier --json; left out, it is measured.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Rank the members for a situation: predicted time, memory and deviation from exact softmax.

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
        look.put_json(advice.as_dict())
        return
    console = look.open_console()
    if advice.ranked:
        look.put(console, look.table(HEADINGS, (_row(n, choice) for n, choice in enumerate(advice.ranked, 1))))
    else:
        look.put(console, "No member fits.")
    for title, rows in _sections(advice):
        console.print(f"\n{title}")
        look.put(console, look.pairs(rows))


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
    """A time in the unit that suits it.

    >>> _seconds(0.0123), _seconds(75.0), _seconds(7200.0)
    ('12.3 ms', '75 s', '2 h')
    """
    for unit, size in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * size or (unit == "s" and seconds >= 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"


def _sections(advice: advisor.Advice) -> Iterator[tuple[str, list[tuple[str, str]]]]:
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
    """The speed of a machine from a JSON file: its own fields, or those under the key "machine"."""
    try:
        content = json_format.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json_format.JSONDecodeError) as error:
        raise ArgumentError(f"`--machine` must be a readable JSON file; {str(path)!r} is not: {error}.") from error
    found = content.get("machine", content) if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ArgumentError(f"`--machine` must hold an object of seconds by kind of work; got {str(path)!r}.")
    known = [f.name for f in fields(Work)]
    for name in found:
        if name not in known:
            raise unknown_name("kind of work", name, known)
    machine = Machine(**found)
    if missing := [name for name in known if name not in found]:
        raise ArgumentError(f"`--machine` must give the seconds of every kind of work; {', '.join(missing)} missing.")
    if not machine.flops > 0:
        raise ArgumentError("`--machine` must have `flops` above 0: nothing is done in no time.")
    return machine
