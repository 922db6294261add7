"""`docs/public_benchmark.md`: losses for the top of a list on splits that others made, ours beside theirs.

`rows` reads kept runs, `users` compares rows over users and seeds, `tables` and `gap` write the sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manymax.errors import ManymaxError
from manymax.paper.public.gap import gap
from manymax.paper.public.rows import CONFIG, PUBLIC_RESULTS, PublicRow, published, read_rows
from manymax.paper.public.tables import at_20, at_every_cutoff, goals, tuning
from manymax.paper.public.users import USERS_FILE, measure, read_users
from manymax.study.files import atomic_write, write_json
from manymax.study.record_files import KEPT_SUFFIX

__all__ = ["PUBLIC_PAGE", "PUBLIC_RESULTS", "page", "read_rows", "write"]

PUBLIC_PAGE = Path("docs/public_benchmark.md")

PUBLIC_INTRODUCTION = """# Losses for the top of a list, on a table that others made

Written by `manymax public` from the records in `{results}`; no number is typed by hand. Data, splits and the numbers
in the columns "printed" are those of {source} ({splits}). Ours are of the test part, with the settings and the epoch
that are best on the validation part, a tenth of each user's training items: the mean over seeds, with the standard
deviation over seeds. Every loss had the same number of trials. All items count that the user has not had in training.

Where nothing else is said, a loss is computed exactly, over all items; its authors draw 1,000. SL is softmax of cosines
over a temperature, as its authors compute it: neither the positive itself nor other positives of the user are in the
sum. The row softmax has the sum over all items.
"""


def write(root: Path, originals: Sequence[Path] = ()) -> list[Path]:
    """Write the page from `results/public`.

    Args:
        root: the top folder of a checkout.
        originals: folders with original runs, to compare the rows anew with the metrics of their users.

    Returns:
        The files that were written.
    """
    rows = read_rows(root)
    written = []
    try:
        if originals:
            write_json(root / PUBLIC_RESULTS / USERS_FILE, measure(rows, originals, read_users(root)))
            written.append(root / PUBLIC_RESULTS / USERS_FILE)
        with atomic_write(root / PUBLIC_PAGE) as partial:
            partial.write_text(page(root, rows), encoding="utf-8")
    except OSError as error:
        raise ManymaxError(f"{error.filename or root} cannot be written: {error.strerror or error}.") from None
    return [*written, root / PUBLIC_PAGE]


def page(root: Path, rows: Sequence[PublicRow]) -> str:
    """The page in Markdown."""
    content = published()
    parts = [
        PUBLIC_INTRODUCTION.format(results=PUBLIC_RESULTS, source=content["source"], splits=content["splits"]),
        *at_20(rows),
        *at_every_cutoff(rows),
        "## What was to be reached\n",
        "\n".join(goals(rows)) + "\n",
        *gap(rows, read_users(root)),
        "## How the rows were tuned\n",
        *tuning(rows),
        *_how(rows),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _how(rows: Sequence[PublicRow]) -> list[str]:
    """Commands, seeds and versions."""
    records = [record for row in rows for record in (*row.trials, *row.further)]
    versions = sorted({" ".join(f"{name} {v}" for name, v in record.versions.items()) for record in records})
    machines = sorted({f"{record.machine.get('cpu')}, {record.machine.get('threads')} thread" for record in records})
    names = dict.fromkeys(row.data for row in rows)
    commands = [
        f"manymax study {CONFIG} --set data={name}.parquet --out studies/{name}\n"
        f"manymax records studies/{name} --into {PUBLIC_RESULTS / name}{KEPT_SUFFIX} --without-curves"
        for name in names
    ]
    folders = " ".join(f"--runs studies/{name}" for name in names)
    seeds = sorted({record.settings["seed"] for record in records})
    return [
        "## How it was run\n",
        "\n".join(["```sh", *commands, f"manymax public {folders}", "```"]) + "\n",
        f"Seeds {', '.join(map(str, seeds))}, the first for all trials; a seed changes the validation part too. "
        f"{'; '.join(versions)}. {'; '.join(machines)}, shared with other work: hours are no benchmark.\n",
    ]
