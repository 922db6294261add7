"""What is found out about the data of a study before its first run: that it can be read, and that the settings fit it.

Each run reads its data by itself. Without this check a file that cannot be read would fail once per run, and a setting
that does not fit the data only when its run begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from manymax.study.config import RunConfig
from manymax.study.data.load import planted_size
from manymax.study.engines import final_record
from manymax.study.run import prepare_data
from manymax.study.run_head import check_negatives


def unfinished(configs: Iterable[RunConfig], folder: Path) -> list[RunConfig]:
    """The runs that have something left to do in the folder of a study."""
    return [config for config in configs if final_record(folder / config.content_hash()) is None]


def check_data(configs: Iterable[RunConfig], tell: Callable[[str], None]) -> None:
    """Read and prepare each data set of some runs once.

    Args:
        configs: the runs.
        tell: is told, one sentence at a time, what is read, what was found, and what is odd about the settings.

    Raises:
        ManymaxError: data cannot be read or prepared, or a run cannot work on it.
    """
    by_data: dict[str, list[RunConfig]] = {}
    for config in configs:  # the split of other seeds has other rows, but as many
        by_data.setdefault(config.data.model_dump_json(), []).append(config)
    for same_data in by_data.values():
        data = same_data[0].data
        size = planted_size(data.source, data.size)
        if size is not None:  # drawn on this machine: there is no file that could be wrong
            num_items = size.items
        else:
            tell(f"reading {data.title}")
            prepared = prepare_data(same_data[0])
            tell(f"{data.title}: {sizes(prepared.card[-1])}")
            num_items = prepared.split.num_items
            for config in same_data:
                check_negatives(config, prepared.split)
        for remark in dict.fromkeys(each for config in same_data for each in remarks(config, num_items)):
            tell(remark)


def sizes(step: dict[str, int]) -> str:
    """The counts of a step of a data card in words.

    >>> sizes({"users": 4279, "items": 4070, "interactions": 321244})
    '4,279 users, 4,070 items, 321,244 interactions'
    """
    return ", ".join(f"{step[name]:,} {name}" for name in ("users", "items", "interactions"))


def remarks(config: RunConfig, num_items: int) -> Iterator[str]:
    """Sentences about settings that work with this number of items but can hardly be meant."""
    if config.member.kind == "sampled" and config.sampler.num_negatives > num_items:
        yield (
            f"{config.loss.name} draws {config.sampler.num_negatives:,} negatives for each positive, but"
            f" {config.data.title} has {num_items:,} items: an exact loss, which scores each item once, costs less. Set"
            f" `num_negatives` to at most {num_items}."
        )
