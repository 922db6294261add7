"""Training steps from queries and class vectors: manymax's heads against their peers and against each other.

    python benchmarks/heads.py --json FILE          everything: about 20 minutes on 2 cores
    python benchmarks/heads.py --only chunked,rank  some groups
    python benchmarks/heads.py --quick              small sizes, under a minute
    python benchmarks/heads.py --json FILE --page docs/speed.md    write FILE's figures into the page, measure nothing

A step is the loss with its gradients to queries and class vectors; N = 2048, d = 64. "trained" scores are like those of
a trained model, "fresh" ones small and random. Each line is a ratio of medians of interleaved runs with its bar, or a
ratio of peaks of memory above inputs and gradients. FILE is written after every line. Groups that it already holds
completely are not measured again unless --only names them. The curves of growth go into an SVG file next to FILE.

The groups are in head_groups.py and head_curves.py, the losses in head_losses.py, the tables in head_page.py.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import torch
from head_curves import growth, trajectory
from head_groups import alpha, bf16, chunked, grouped, million, own, peers, rank, sampled, softmax
from head_page import write_page
from head_problems import Figures
from measure import limits, parser

GROUPS = {
    f.__name__: f
    for f in (softmax, chunked, bf16, peers, own, alpha, million, rank, grouped, sampled, trajectory, growth)
}


def set_sizes(a: argparse.Namespace) -> None:
    """Add the sizes of all groups to the arguments, small ones for --quick."""
    quick = a.quick
    a.rows = 128 if quick else 2048
    a.sizes = (500, 2_001, 8_000) if quick else (3_307, 40_981, 200_000)
    a.million = 20_000 if quick else 1_000_000
    a.rank = (1_000, 5_001, 20) if quick else (30_000, 41_000, 27)  # users, items, seen items per user
    a.group = (1_000, 27, 2_001) if quick else (30_000, 27, 40_981)  # users, pairs per user, classes
    a.path = (500, 1_000, 16) if quick else (5_000, 10_000, 288)  # users, classes, steps
    a.rounds = 1 if quick else a.rounds


def main(arguments: argparse.Namespace) -> int:
    """Run the chosen groups, or write the page; the exit code is 1 if a bar was missed at full sizes."""
    if arguments.page:
        write_page(Path(arguments.page), Path(arguments.json))
        return 0
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    set_sizes(arguments)
    gc.freeze()  # the collector, which runs before every step, then skips the objects that the imports made
    figures, peaks = Figures(arguments), limits()
    print("limits of this machine: ", "  ".join(f"{k} {v:.3g}" for k, v in peaks.items()))
    for name in arguments.only or GROUPS:
        if not arguments.only and figures.groups.get(name, {}).get("complete"):
            print(f"{name}: kept from {figures.path}")
            continue
        print(f"-- {name}: {GROUPS[name].__doc__}", flush=True)
        figures.begin(name, peaks)
        GROUPS[name](arguments, figures)
        figures.current["complete"] = True
        figures.save()
    lines = [entry for group in figures.groups.values() for entry in group["lines"] if entry["verdict"]]
    missed = [entry for entry in lines if entry["verdict"] == "not reached"]
    print(f"{len(lines) - len(missed)} of {len(lines)} bars reached")
    return 0 if arguments.quick else bool(missed)


def read_groups(text: str) -> list[str]:
    """Names of groups from a comma-separated text; an error that lists them for any other name."""
    names = text.split(",")
    for name in names:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"no group {name!r}; there are {', '.join(GROUPS)}")
    return names


if __name__ == "__main__":
    made = parser(__doc__ or "")
    made.add_argument("--only", type=read_groups, help=f"groups, comma-separated: {', '.join(GROUPS)}")
    made.add_argument("--page", metavar="PAGE", help="write the figures of --json FILE into PAGE, measure nothing")
    read = made.parse_args()
    if read.page and not (read.json and Path(read.json).exists()):
        made.error("--page needs --json FILE, a file of figures that exists")
    sys.exit(main(read))
