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
from manymax.cli.advise_study import MeasuredLoss, as_dicts, duration, items_of, of_study, ranked_by
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


def read_count(text: str | int) -> int:
    """A whole number, also in the notation of large ones.

    >>> read_count("1e6"), read_count("1_000_000"), read_count("40981")
    (1000000, 1000000, 40981)
    """
    try:
        number = float(text)
        whole = int(text) if isinstance(text, int) or text.lstrip("-").isdigit() else int(number)
    except (ValueError, OverflowError):
        raise ArgumentError(f"a count must be a whole number, such as 40981 or 1e6; got {text!r}.") from None
    if whole != number:
        raise ArgumentError(f"a count must be a whole number, such as 40981 or 1e6; got {text!r}.")
    return whole


def advise(
    num_classes: Annotated[
        int | None,
        typer.Argument(
            metavar="CLASSES",
            parser=read_count,
            help="The number of classes, C; 1e6 is a number too. With --study its number of items if left out.",
        ),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(help="Folder of a finished study: rank its losses by what they reached, and predict their cost."),
    ] = None,
    dim: Annotated[int, typer.Option(help="Size of the queries and class vectors, d.")] = 64,
    batch: Annotated[int, typer.Option(help="Rows of a training step, N.")] = 1024,
    examples: Annotated[
        int | None,
        typer.Option(parser=read_count, help="Training examples of an epoch; needed to predict the time of an epoch."),
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
        typer.Option(help="log q of a proposal, shape (classes,), in such a file; compared with the others."),
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
    more reliable. With a finished study (--study) the losses are ranked by what they reached there.

    \b
    Examples:
      manymax advise 40981 --examples 1027370 --positives 27
      manymax advise 1000000 --max-step-seconds 0.1 --metric recall
      manymax advise 3307 --scores scores.npy --json
      manymax advise 1e6 --study studies/mine
    """
    if num_classes is None:
        if study is None:
            raise ArgumentError("give the number of classes, or a finished study with `--study`.")
        num_classes = items_of(study)
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
    if study is not None:
        _put_study(study, advice, json)
        return
    if json:
        display.put_json(advice.as_dict())
        return
    console = display.open_console()
    if advice.ranked:
        ranking = (_row(n, choice) for n, choice in enumerate(advice.ranked, 1))
        display.put(console, advice.ranked_by)
        display.put(console, display.table(ADVICE_HEADERS, ranking))
        display.put(console, COLUMNS_NOTE)
    else:
        display.put(console, "No member fits the limits.")
    for title, rows in _sections(advice):
        console.print(f"\n{title}")
        display.put(console, display.pairs(rows))


def _put_study(study: Path, advice: advisor.Advice, json: bool) -> None:
    """Print the losses of a study by measured quality, with their predicted cost."""
    metric, losses = of_study(study, advice)
    about = ranked_by(metric, study, items_of(study), advice)
    if json:
        display.put_json({"ranked_by": about, "metric": metric, "losses": as_dicts(losses)})
        return
    console = display.open_console()
    display.put(console, about)
    headers = ["data", "backbone", "loss", f"{metric} valid", "test", "seeds", "step", ""]
    display.put(console, display.table(headers, (_measured_row(each, advice) for each in losses)))
    for text in advice.warnings:
        display.put(console, f"mind: {text}")


def _measured_row(loss: MeasuredLoss, advice: advisor.Advice) -> list[str]:
    step, remark = "unknown", "equal to the best" if loss.equal else ""
    if loss.step_seconds is not None:
        step = duration(loss.step_seconds)
        remark = "over the limit" if loss.step_seconds > advice.situation.seconds_limit else remark
    quality = _quality(loss.valid), _quality(loss.test)
    return [loss.data, loss.backbone, loss.loss, *quality, str(loss.runs), step, remark]


def _quality(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _row(number: int, choice: advisor.Choice) -> list[str]:
    return [
        str(number),
        choice.member,
        _settings(choice),
        duration(choice.step_seconds),
        "-" if choice.epoch_seconds is None else duration(choice.epoch_seconds),
        f"{choice.memory / 1e9:.3g} GB",
        "unknown" if choice.deviation is None else f"{choice.deviation:.2g}",
        "-" if choice.needed_negatives is None else f"{choice.needed_negatives:,}",
        "yes" if choice.consistent else "no",
    ]


def _settings(choice: advisor.Choice) -> str:
    proposal = {} if choice.proposal is None else {"proposal": choice.proposal}
    return settings_text(choice.settings | proposal)


def _sections(advice: advisor.Advice) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The parts of the output below the table: (title, [(name, text), ...])."""
    if advice.ranked:
        yield "Why, and what each gives up", [line for choice in advice.ranked for line in _reasons(choice)]
    if advice.rejected:
        yield "Rejected", [(f"{c.member} ({_settings(c)})", str(c.rejected)) for c in advice.rejected]
    if advice.warnings:
        yield "Mind", [("", text) for text in advice.warnings]
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
