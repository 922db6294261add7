"""What runs are called: the loss, with as many settings as tell a run from the others of a study."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

Settings = Mapping[str, Any]

# They change what is learned from.
DATA_SETTINGS = ("columns", "size", "preset", "min_rating", "k_core", "split", "drop_missing")
VARIANT_SETTINGS = ("solver", "sampler", "exclude", "decoupled")  # they make another loss of a loss; see `variant`
STOPPING_SETTINGS = ("epochs", "patience", "eval_every")  # they change when a run ends, not what a step does


def loss_label(loss: str, details: Settings) -> str:
    """A loss with some of its settings; those that are None are left out.

    >>> loss_label("nce", {"num_negatives": 5, "pool": None})
    'nce (num_negatives=5)'
    """
    known = [f"{key}={value}" for key, value in details.items() if value is not None]
    return f"{loss} ({', '.join(known)})" if known else loss


def setting_text(value: Any) -> str:
    """A value of a setting, a number without needless digits.

    >>> setting_text(0.010), setting_text("users")
    ('0.01', 'users')
    """
    return f"{value:g}" if isinstance(value, float) else str(value)


def variant(settings: Settings) -> str:
    """What is minimised: the loss, with what makes another loss of it rather than being tuned.

    That is a solver, another proposal of negatives, and what the sums of a row leave out.

    >>> variant({"loss": "nce", "solver": "gradient", "sampler": "dns"})
    'nce (dns)'
    """
    solver, sampler = settings.get("solver", "gradient"), settings.get("sampler", "uniform")
    details = [] if solver == "gradient" else [solver]
    details += [] if sampler == "uniform" else [sampler]
    details += [f"exclude {settings['exclude']}"] if settings.get("exclude", "none") != "none" else []
    details += ["decoupled"] if settings.get("decoupled") else []
    return f"{settings['loss']} ({', '.join(details)})" if details else str(settings["loss"])


def varied_settings(siblings: Sequence[Settings]) -> list[dict[str, Any]]:
    """The settings that vary among some runs of one loss and backbone on the same data, with the values of each run.

    What tables show elsewhere (data, backbone, loss, learning rate, seed) is left out. So is a setting that follows
    from those before it, as the batches do from the solver. Hence the order: de-biasing goes before the correction
    that it asks for, and the learning rate before the settings that end a run.
    """
    shown_elsewhere = {"data", "name", "backbone", "loss", "lr", "seed", *DATA_SETTINGS, *STOPPING_SETTINGS}
    varying = []
    known: list[tuple[str, ...]] = [data_place(settings) for settings in siblings]
    others = (key for settings in siblings for key in settings if key not in shown_elsewhere)
    for key in dict.fromkeys(("debias", *others, "lr", *STOPPING_SETTINGS)):
        with_key = [(*parts, repr(settings.get(key))) for parts, settings in zip(known, siblings, strict=True)]
        if len(set(with_key)) > len(set(known)):
            varying.append(key)
            known = with_key
    return [{key: settings.get(key) for key in varying if key != "lr"} for settings in siblings]


def telling(varied: Settings, siblings: Sequence[Settings]) -> dict[str, Any]:
    """As many of the varied settings, in their order, as tell these values from those of the siblings."""
    details = {}
    for key, value in varied.items():
        alike = [other for other in siblings if other[key] == value]
        if len(alike) < len(siblings):
            details[key] = value
        siblings = alike
    return details


def run_labels(runs: Sequence[Settings]) -> list[str]:
    """For each run its loss, with the settings that tell it from the other runs of that loss and backbone.

    Learning rate and seed are left out: they have columns of their own.

    >>> ssm = {"loss": "ssm", "backbone": "mf", "data": "a", "seed": 0}
    >>> run_labels([ssm | {"k": 5}, ssm | {"k": 20}, ssm | {"loss": "softmax"}])
    ['ssm (k=5)', 'ssm (k=20)', 'softmax']
    """
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, settings in enumerate(runs):
        groups[settings["loss"], settings["backbone"]].append(index)
    labels = [""] * len(runs)
    for (loss, _), members in groups.items():
        varied = varied_settings([runs[index] for index in members])
        different = list({repr(values): values for values in varied}.values())
        for index, values in zip(members, varied, strict=True):
            labels[index] = loss_label(loss, telling(values, different))
    return labels


def data_name(settings: Settings) -> str:
    """What a data set is called: the name it was given, or the stem of its file.

    >>> data_name({"data": "ml-1m.parquet"}), data_name({"data": "a.csv", "name": "books"})
    ('ml-1m', 'books')
    """
    return str(settings.get("name") or PurePath(settings["data"]).stem)


def data_place(settings: Settings) -> tuple[str, str]:
    """The data with its filters, and the backbone."""
    return repr([settings["data"], *(settings.get(key) for key in DATA_SETTINGS)]), str(settings["backbone"])
