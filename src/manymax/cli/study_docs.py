"""The generated part of docs/study_files.md: all settings of a run."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from manymax.errors import ArgumentError
from manymax.study.groups import ALL_GROUPS
from manymax.study.run_options import Option, options

STUDY_PAGE = Path("docs/study_files.md")
SETTINGS_BEGIN, SETTINGS_END = "<!-- settings: begin, written by `make docs` -->", "<!-- settings: end -->"


def with_settings(page: str) -> str:
    """The text `page` with the current tables of settings between its two markers."""
    before, begin, following = page.partition(SETTINGS_BEGIN)
    _, end, after = following.partition(SETTINGS_END)
    if not begin or not end:
        raise ArgumentError(
            f"{STUDY_PAGE} must hold the markers {SETTINGS_BEGIN} and {SETTINGS_END}, one after the other."
        )
    return f"{before}{begin}\n{settings_tables()}\n{end}{after}"


def settings_tables() -> str:
    """The settings of all groups as Markdown tables."""
    order = list(ALL_GROUPS)
    by_group = groupby(sorted(options(), key=lambda option: order.index(option.group)), key=lambda option: option.group)
    return "\n\n".join(_table(group, list(own)) for group, own in by_group)


def _table(group: str, own: list[Option]) -> str:
    what = str(ALL_GROUPS[group].__doc__).strip().splitlines()[0] if group else "Settings that belong to no group."
    rows = [f"| `{option.name}` | {_default(option)} | {_meaning(option)} |" for option in own]
    title = f"### {group}" if group else "### The rest"
    return "\n".join([title, "", what, "", "| setting | default | meaning |", "| --- | --- | --- |", *rows])


def _default(option: Option) -> str:
    """The default as it is written in a file; empty for none."""
    value = option.default
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _meaning(option: Option) -> str:
    choices = f" One of {', '.join(f'`{word}`' for word in option.choices)}." if option.choices else ""
    return f"{option.help}{choices}".replace("|", "\\|")
