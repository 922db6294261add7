"""Tables of the public page: ours beside theirs, N@k at every cutoff, goals, and how each row was tuned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from manymax.paper.public.rows import METRIC, PublicRow, by_place, published
from manymax.study.records import Record
from manymax.study.report.formats import Cell, ReportTable, markdown

CUTOFFS = (5, 10, 20, 50, 75, 100)
BACKBONE_TITLES = {"mf": "MF", "lightgcn": "LightGCN, two layers"}
CLOSE = 0.98  # of a printed number: what counts as reached
# Goals of single rows: the printed name, the share of its numbers, and how long an epoch may take in those of softmax.
SLOW_GOALS = {"LambdaLoss@20": (0.97, 5.0)}
NEAR_GOALS = ("SL", "PSL", "SL@20")


def theirs(row: PublicRow, metric: str) -> float | None:
    """The printed number of the same loss, data and backbone."""
    content = published()
    printed = content["data"][row.data]["at_20"].get(row.backbone, {})
    return printed.get(content["same_loss"].get(row.title, row.title), {}).get(metric)


def at_20(rows: Sequence[PublicRow]) -> Iterator[str]:
    """For each data set and backbone: N@20 and R@20, ours beside theirs, losses that only they have included."""
    content = published()
    for (data, backbone), here in by_place(rows).items():
        title = f"{content['data'][data]['title']}, {BACKBONE_TITLES.get(backbone, backbone)}"
        best = max((row.mean() or 0.0 for row in here), default=0.0)
        lines = []
        for row in here:
            cells = []
            for metric in (METRIC, "recall@20"):
                value, printed = row.mean(metric), theirs(row, metric)
                cells.append(Cell(value, row.spread(metric), text="-", best=value == best and metric == METRIC))
                cells.append(Cell(printed, text=""))
                cells.append(Cell(text="" if printed is None or value is None else f"{value / printed:.1%}"))
            lines.append(((row.title,), (*cells, Cell(text=str(len(row.runs))))))
        known = {content["same_loss"].get(row.title, row.title) for row in here}
        for name, each in content["data"][data]["at_20"].get(backbone, {}).items():
            if name not in known:
                cells = [
                    cell for metric in (METRIC, "recall@20") for cell in (Cell(text=""), Cell(each[metric]), Cell())
                ]
                lines.append(((name,), (*cells, Cell(text=""))))
        columns = [(name, part) for name in ("N@20", "R@20") for part in ("ours", "printed", "share")]
        yield markdown(ReportTable("at_20", title, ("loss",), (*columns, ("seeds",)), tuple(lines)))


def at_every_cutoff(rows: Sequence[PublicRow]) -> Iterator[str]:
    """N@k on the sets whose publication has it, ours beside theirs in brackets."""
    content = published()
    for (data, backbone), here in by_place(rows).items():
        ndcg = content["data"][data]["ndcg"]
        if not ndcg or backbone != "mf":
            continue
        lines = []
        for row in here:
            name = content["same_loss"].get(row.title, row.title)
            printed = ndcg.get(content["same_at_each_cutoff"].get(name, name), {})
            cells = [
                Cell(row.mean(f"ndcg@{k}"), row.spread(f"ndcg@{k}"), text="-", paper=printed.get(str(k)))
                for k in CUTOFFS
            ]
            lines.append(((row.title,), tuple(cells)))
        columns = tuple((f"N@{k}",) for k in CUTOFFS)
        title = f"N@k on {content['data'][data]['title']}, {BACKBONE_TITLES[backbone]}"
        note = "In brackets what its authors print; for SL@20 at other k that is their SL@K."
        yield markdown(ReportTable("ndcg", title, ("loss",), columns, tuple(lines), note))


def goals(rows: Sequence[PublicRow]) -> Iterator[str]:
    """What the table was to reach, and whether it does, as a list."""
    for (data, backbone), here in by_place(rows).items():
        if backbone != "mf":
            continue
        place = published()["data"][data]
        by_title = {row.title: row for row in here}
        for name in NEAR_GOALS if place["ndcg"] else ():
            yield _near(place["title"], name, by_title.get(name), CLOSE)
        for name, (share, pace) in SLOW_GOALS.items():
            if name in place["at_20"]["mf"]:
                yield _near(place["title"], name, by_title.get(name), share)
                yield _pace(place["title"], by_title.get(name), by_title.get("softmax"), pace)
        best = max(place["at_20"]["mf"].items(), key=lambda each: each[1][METRIC])
        ours = max(here, key=lambda row: row.mean() or 0.0)
        above = (ours.mean() or 0.0) > best[1][METRIC]
        yield (
            f"- {place['title']}: the best of ours, {ours.title} with N@20 {ours.mean() or 0:.4f}, is"
            f" {'above' if above else '**not above**'} the best printed, {best[0]} with {best[1][METRIC]:.4f}"
        )


def _near(place: str, name: str, row: PublicRow | None, share: float) -> str:
    if row is None or row.mean() is None:
        return f"- {place}, {name}: not run yet"
    shares = {metric: (row.mean(metric) or 0.0) / (theirs(row, metric) or 1.0) for metric in (METRIC, "recall@20")}
    reached = all(each >= share for each in shares.values())
    return (
        f"- {place}, {name}: {'reached' if reached else '**not reached**'}, N@20 {shares[METRIC]:.1%} and R@20"
        f" {shares['recall@20']:.1%} of the printed ones, {share:.0%} asked for"
    )


def _pace(place: str, row: PublicRow | None, softmax: PublicRow | None, most: float) -> str:
    if row is None or softmax is None or not row.epoch_seconds or not softmax.epoch_seconds:
        return f"- {place}, seconds of an epoch: not run yet"
    times = row.epoch_seconds / softmax.epoch_seconds
    verdict = "reached" if times <= most else "**not reached**"
    return (
        f"- {place}, {row.title}: an epoch takes {times:.1f} times softmax's, at most {most:g} asked for: {verdict}."
        " These are epochs of the runs, which shared the machine with others to different degrees."
    )


def tuning(rows: Sequence[PublicRow]) -> Iterator[str]:
    """How each row was tuned: trials, best settings with those at the end of their range marked, and time."""
    for (data, backbone), here in by_place(rows).items():
        names = list(dict.fromkeys(name for row in here for name in row.search.space))
        lines = []
        for row in here:
            ended = sum(trial.status == "pruned" for trial in row.trials)
            trials = f"{len(row.trials)} of {row.search.trials}, {ended} ended early"
            settings = [Cell(text=_setting(row, name)) for name in names]
            best, seconds = row.best, sum(sum(each.seconds.values()) for each in _records(row))
            lines.append(
                (
                    (row.title,),
                    (
                        Cell(text=trials),
                        *settings,
                        Cell(row.search.value(best) if best else None, text="-"),
                        Cell(text=str(best.best_epoch) if best else "-"),
                        Cell(row.epoch_seconds, text="-", digits=2),
                        Cell(seconds / 3600, digits=1),
                    ),
                )
            )
        columns = ["trials", *names, "N@20 on validation", "best epoch", "seconds per epoch", "hours in all"]
        title = f"{published()['data'][data]['title']}, {BACKBONE_TITLES.get(backbone, backbone)}"
        yield "#" + markdown(ReportTable("tuning", title, ("loss",), tuple((c,) for c in columns), tuple(lines)))


def _records(row: PublicRow) -> list[Record]:
    return list({record.hash: record for record in (*row.trials, *row.further)}.values())


def _setting(row: PublicRow, name: str) -> str:
    """A best value, with a sign where it is at the end of its range; values that a row fixes without a sign."""
    if name in row.values:
        edge = row.search.space[name].edge(row.values[name])
        return f"{row.values[name]:g}" + (f" ({edge} end)" if edge else "")
    if row.best is None:
        return "-"
    return str(row.search.row.get(name, ""))
