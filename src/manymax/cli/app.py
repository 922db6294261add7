"""The table of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from manymax import __version__
from manymax.cli.advise import advise
from manymax.cli.data import data
from manymax.cli.diagnose import diagnose
from manymax.cli.docs import docs
from manymax.cli.export import export
from manymax.cli.losses import losses
from manymax.cli.plan import plan
from manymax.cli.recommend import recommend
from manymax.cli.report import report
from manymax.cli.reproduction import records, reproduction
from manymax.cli.show import show
from manymax.cli.study import study
from manymax.cli.theory import theory
from manymax.cli.train import train_command


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"manymax {__version__}")
        raise typer.Exit


def manymax(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The softmax family of losses: what each member is, what is true of it, and which one to use.

    \b
    Examples:
      manymax losses               the family and its facts, one row a member
      manymax show sparsemax       formulas, calls and facts of one member
      manymax show ssm             other names work too
      manymax losses --json        everything, for programs
      manymax theory               the paper's theory, run again
      manymax advise 1000000       which loss for a million classes, and why
      manymax train                one model with one loss on built-in data
      manymax study                every member on built-in data, and a report
    """


def build_app() -> typer.Typer:
    """The command, with an option for each setting that the tables declare at this moment."""
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
    app.add_typer(data, name="data")
    app.command("train")(train_command())
    app.command()(recommend)
    app.command()(export)
    app.command()(study)
    app.command()(report)
    app.command(hidden=True)(docs)
    app.command(hidden=True)(records)
    app.command(hidden=True)(reproduction)
    return app


def __getattr__(name: str) -> typer.Typer:
    """`app` is built when it is asked for, not when this module is imported."""
    if name == "app":
        return build_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
