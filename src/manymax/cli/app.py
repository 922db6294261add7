"""All commands of `manymax`, put together into one typer app."""

from __future__ import annotations

from typing import Annotated

import typer

from manymax import __version__
from manymax.cli.advise import advise
from manymax.cli.choose import choose_command
from manymax.cli.console import say
from manymax.cli.data import data
from manymax.cli.diagnose import diagnose
from manymax.cli.docs import docs
from manymax.cli.doctor import doctor
from manymax.cli.export import export
from manymax.cli.gpu_check import gpu_check
from manymax.cli.losses import losses
from manymax.cli.plan import plan
from manymax.cli.recommend import recommend
from manymax.cli.report import report
from manymax.cli.reproduction import public, records, reproduction
from manymax.cli.show import show
from manymax.cli.study import study
from manymax.cli.theory import theory
from manymax.cli.train import train_command


def _version(wanted: bool) -> None:
    if wanted:
        say(f"manymax {__version__}")
        raise typer.Exit


def manymax(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The softmax family of losses: what each member is, what is true of it, and which one to use.

    To find the loss for your data: choose. To look things up: losses, show, theory. To predict before there is data:
    advise, diagnose, plan. To train and compare models on data: data, train, study, report. To use a trained model:
    recommend, export. To look at this machine: doctor, gpu-check. Every command explains itself with --help.

    \b
    Examples:
      manymax choose ratings.csv   which loss for this file, how much better it is, and a model
      manymax losses               the family and its facts, one row per member
      manymax show sparsemax       formulas, calls and facts of one member
      manymax show ssm             a member by its alias
      manymax losses --json        everything about every member, for programs
      manymax theory               the paper's theory tables, checked cell by cell
      manymax advise 1000000       which loss for a million classes, and why
      manymax train                train one model with one loss on built-in data
      manymax study                every member on built-in data, and a report
      manymax doctor               what losses are computed on here, and how fast that can be
      manymax gpu-check            values and times of the GPU kernels, to send in
    """


def build_app() -> typer.Typer:
    """The `manymax` command; `train` gets an option per setting that members, samplers and backbones declare now."""
    app = typer.Typer(
        name="manymax",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help keeps the lines of the examples
    )
    app.callback()(manymax)
    app.command()(losses)
    app.command()(show)
    app.command()(theory)
    app.command()(diagnose)
    app.command()(advise)
    app.command()(plan)
    app.command("choose")(choose_command())
    app.add_typer(data, name="data")
    app.command("train")(train_command())
    app.command()(recommend)
    app.command()(export)
    app.command()(study)
    app.command()(report)
    app.command()(doctor)
    app.command("gpu-check")(gpu_check)
    app.command(hidden=True)(docs)
    app.command(hidden=True)(records)
    app.command(hidden=True)(reproduction)
    app.command(hidden=True)(public)
    return app


def __getattr__(name: str) -> typer.Typer:
    """Build `app` at access, not at import: rows added to the tables meanwhile bring their options along."""
    if name == "app":
        return build_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
