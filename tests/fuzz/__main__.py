"""The sweep on demand: `python -m tests.fuzz`, all calls, or `--only TEXT`, or `--sample 2000 --seed 7`."""

from __future__ import annotations

import argparse
import collections
import random

from tests.fuzz.exceptions import reason_for
from tests.fuzz.sweep import cases, sample, sweep


def main() -> None:
    """Run calls, print the findings and how many there are, and fail if there are any without a reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="calls whose name, 'subject argument value', holds this text")
    parser.add_argument("--sample", type=int, help="so many calls, chosen at random")
    parser.add_argument("--seed", type=int, help="of the choice; printed")
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    chosen = cases(given.only)
    if given.sample is not None:
        chosen = sample(chosen, given.sample, seed)
    print(f"{len(chosen)} calls, seed {seed}", flush=True)
    counts: collections.Counter[str] = collections.Counter()
    excused: collections.Counter[str] = collections.Counter()
    for found in sweep(chosen):
        reason = reason_for(found)
        if reason is None:
            counts[found.kind] += 1
            print(found, flush=True)
        else:
            excused[reason] += 1
    for reason, number in excused.most_common():
        print(f"excepted, {number}: {reason}")
    print(f"{len(chosen)} calls, {sum(counts.values())} findings: {dict(counts)}")
    raise SystemExit(bool(counts))


if __name__ == "__main__":
    main()
