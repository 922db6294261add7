"""The paper's question at each loss's own best scale: is there still a gap between softmax and the sparse losses?

All sentences that state figures are made from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from manymax.paper.public.rows import PublicRow, by_place, published
from manymax.paper.public.tables import BACKBONE_TITLES
from manymax.paper.public.users import LEVEL, difference
from manymax.study.report.formats import Cell, ReportTable, markdown

BASE, CLAIMED_BEST = "softmax", "rankmax"
SIMPLE = "mf"
EXPLANATION = (
    "The paper compares losses at scores of one scale. Here each loss has a temperature of its own, chosen on the"
    " validation part like its learning rate, and the sums of softmax and of the sparse losses are over the same items,"
    f" all of them. Differences are shares of softmax's N@20; in brackets a {LEVEL:.0%} interval over users and seeds,"
    " of each comparison by itself. Level means that the interval holds 0."
)


def gap(rows: Sequence[PublicRow], users: Mapping[str, Any]) -> Iterator[str]:
    """The section, in Markdown."""
    yield "## Is there still a gap between softmax and the sparse losses?\n"
    yield EXPLANATION + "\n"
    places = by_place(rows)
    lines = [
        ((_place(row), row.title), (Cell(text=_temperature(base)), Cell(text=_temperature(row)), Cell(text=text)))
        for row, base, text in _differences(places, users)
    ]
    if not lines:
        yield "Not run yet.\n"
        return
    columns = (("temperature of softmax",), ("its own",), ("N@20 against softmax",))
    table = ReportTable("gap", "Sparse losses against softmax", ("data and backbone", "loss"), columns, tuple(lines))
    yield "#" + markdown(table)
    yield from _answer(places, users)
    yield "### What is left of findings 1, 2 and 4\n"
    yield from (*_rates(places), *_top(places, users), *_complex(places, users))


def _sparse(here: Sequence[PublicRow]) -> list[PublicRow]:
    return [row for row in here if row.member.sparse and row.mean() is not None]


def _base(here: Sequence[PublicRow]) -> PublicRow | None:
    return next((row for row in here if row.title == BASE and row.mean() is not None), None)


def _differences(
    places: Mapping[Any, list[PublicRow]], users: Mapping[str, Any]
) -> Iterator[tuple[PublicRow, PublicRow, str]]:
    for here in places.values():
        if (base := _base(here)) is not None:
            for row in _sparse(here):
                found = difference(users, row, base)
                alone = (row.mean() or 0.0) / (base.mean() or 1.0) - 1
                yield row, base, f"{alone:+.1%}, no interval yet" if found is None else f"{found}, {found.verdict}"


def _answer(places: Mapping[Any, list[PublicRow]], users: Mapping[str, Any]) -> Iterator[str]:
    """A list with a sentence for each sparse loss: where it is below softmax, level, or above."""
    found: dict[str, dict[str, list[str]]] = {}
    for here in places.values():
        if (base := _base(here)) is not None:
            for row in _sparse(here):
                each = difference(users, row, base)
                verdict = "without an interval" if each is None else each.verdict
                found.setdefault(row.title, {}).setdefault(verdict, []).append(_place(row))
    lines = []
    for title, verdicts in found.items():
        parts = [f"{verdict} on {', '.join(where)}" for verdict, where in verdicts.items()]
        lines.append(f"- {title} against softmax: {'; '.join(parts)}.")
    yield "\n".join(lines) + "\n"


def _rates(places: Mapping[Any, list[PublicRow]]) -> Iterator[str]:
    """Finding 1, that softmax supports larger learning rates."""
    pairs = [(_base(here), row) for here in places.values() for row in _sparse(here)]
    known = [(base, row) for base, row in pairs if base is not None and "lr" in base.values and "lr" in row.values]
    larger = [row for base, row in known if base.values["lr"] > row.values["lr"]]
    details = ", ".join(
        f"{row.title} {row.values['lr']:g} against {base.values['lr']:g} ({_place(row)})" for base, row in known
    )
    yield (
        "- Finding 1, softmax supports larger learning rates than sparse losses: its best rate is the larger one in"
        f" {len(larger)} of {len(known)} comparisons: {details}. A temperature scales the gradient too, and Adam takes"
        " most of that out.\n"
    )


def _top(places: Mapping[Any, list[PublicRow]], users: Mapping[str, Any]) -> Iterator[str]:
    """Finding 2, that rankmax is on top."""
    parts = []
    for here in places.values():
        base, top = (
            _base(here),
            next((row for row in here if row.title == CLAIMED_BEST and row.mean() is not None), None),
        )
        if base is None or top is None:
            continue
        against = difference(users, top, base)
        better = [
            row for row in here if (found := difference(users, row, top)) is not None and found.verdict == "above"
        ]
        names = ", ".join(f"{row.title} {difference(users, row, top)}" for row in better) or "no loss"
        parts.append(f"{_place(top)}: {against or 'no interval'} against softmax; above it {names}")
    yield f"- Finding 2, rankmax achieves top performance: {'. '.join(parts) or 'not run yet'}.\n"


def _complex(places: Mapping[Any, list[PublicRow]], users: Mapping[str, Any]) -> Iterator[str]:
    """Finding 4, that sparse losses fall behind in complex architectures."""
    parts = []
    for (data, backbone), here in places.items():
        simple = places.get((data, SIMPLE), [])
        base, simple_base = _base(here), _base(simple)
        if backbone == SIMPLE or base is None or simple_base is None:
            continue
        for row in _sparse(here):
            other = next((each for each in _sparse(simple) if each.title == row.title), None)
            if other is not None:
                shares = (difference(users, other, simple_base), difference(users, row, base))
                before, after = (str(each) if each else "no interval" for each in shares)
                parts.append(f"{row.title}, {_place(row)}: {after} against softmax, on MF {before}")
    yield f"- Finding 4, sparse losses fall behind in complex architectures: {'. '.join(parts) or 'not run yet'}.\n"


def _place(row: PublicRow) -> str:
    return f"{published()['data'][row.data]['title']}, {BACKBONE_TITLES.get(row.backbone, row.backbone)}"


def _temperature(row: PublicRow) -> str:
    value = row.values.get("temperature")
    if value is None:
        return "-"
    edge = row.search.space["temperature"].edge(value)
    return f"{value:g}" + (f" ({edge} end)" if edge else "")
