"""Every number of the paper's tables of results, with its table and its status.

The tables are typed as they are printed. A row has a data set, a loss, and then N@20, P@20 and R@20, each for every
setting of the table's columns (learning rates, numbers of negatives, or proposals). RG has one value per metric: it is
fitted without a learning rate.

>>> [number.value for number in NUMBERS if number.table == "mf_losses" and number.loss == "rg"][:3]
[0.2785, 0.1521, 0.2945]
>>> DATA["gowalla"].sparsity, round(DATA["gowalla"].counted_sparsity, 2)
(99.16, 99.92)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["printed", "contradicted"]

PAPER_METRICS = ("ndcg@20", "precision@20", "recall@20")
MAIN_METRIC = PAPER_METRICS[0]  # what settings are chosen by, and what findings are decided by

LEARNING_RATES = {"lr": (1e-3, 5e-4, 1e-4)}
NEGATIVES = {"num_negatives": (5, 10, 50, 100)}
PROPOSALS = {"sampler": ("uniform", "dns")}

MIXED = "the learning rate is not stated, and rows mix several"
ONE_TARGET = "recall is 20 times precision: one target per user, not the stated 0.8/0.1/0.1 split"


@dataclass(frozen=True)
class PaperTable:
    """One printed table.

    name, title: ours, for reports.
    backbone: of all its rows.
    columns: {setting: its values in the order of the columns}.
    rows: the printed rows as text.
    note: what a reader of its numbers has to know.
    """

    name: str
    title: str
    backbone: str
    columns: Mapping[str, tuple[float | str, ...]]
    rows: str
    note: str = ""


@dataclass(frozen=True, eq=False)  # a number that is printed in two tables is two numbers
class PaperNumber:
    """One printed number.

    table: the name of its `PaperTable`.
    data, backbone, loss, metric: what it is a number of.
    setting: {`lr`, `num_negatives` or `sampler`: value} of its column; empty where the number holds for a whole row.
    status: "contradicted" where the paper itself prints another number for the same thing, else "printed".
    note: what a reader of the number has to know.
    """

    table: str
    data: str
    backbone: str
    loss: str
    metric: str
    value: float
    setting: dict[str, float | str] = field(default_factory=dict)
    status: Status = "printed"
    note: str = ""


@dataclass(frozen=True)
class PaperData:
    """A row of the paper's table of data sets.

    users, items, interactions: as printed.
    sparsity: in percent, as printed.
    note: which filters fit the counts.
    """

    users: int
    items: int
    interactions: int
    sparsity: float
    note: str

    @property
    def counted_sparsity(self) -> float:
        """The sparsity that follows from the printed counts: 100 (1 - interactions / (users items))."""
        return 100 * (1 - self.interactions / (self.users * self.items))


DATA = {
    "ml-1m": PaperData(6_038, 3_307, 835_789, 95.81, "rating >= 3 and 5-core, not the 10-core of the text"),
    "gowalla": PaperData(29_858, 40_981, 1_027_370, 99.16, "the NGCF release; its sparsity is 99.92 by these counts"),
    "electronics": PaperData(192_403, 63_001, 1_689_188, 99.99, "5-core without rating filter, not 10-core"),
}

PAPER_TABLES = (
    PaperTable(
        "mf_losses",
        "MF, learning rates",
        "mf",
        LEARNING_RATES,
        """
ml-1m        softmax               .2661 .2658 .2482  .1465 .1462 .1391  .2937 .2930 .2596
ml-1m        sparsemax             .2353 .2536 .2463  .1228 .1345 .1344  .2620 .2769 .2651
ml-1m        entmax                .2643 .2631 .2557  .1410 .1426 .1383  .2897 .2852 .2778
ml-1m        rankmax               .2851 .2835 .2621  .1543 .1535 .1452  .3005 .2985 .2710
ml-1m        sampled_softmax       .2644 .2645 .2465  .1462 .1461 .1388  .2908 .2910 .2569
ml-1m        nce                   .2423 .2420 .2227  .1374 .1364 .1280  .2661 .2687 .2283
ml-1m        hierarchical_softmax  .1120 .1193 .1202  .0739 .0736 .0742  .1497 .1236 .1249
ml-1m        rg                    .2785  .1521  .2945
electronics  softmax               .0235 .0231 .0146  .0027 .0027 .0018  .0496 .0494 .0333
electronics  sparsemax             .0214 .0240 .0166  .0023 .0027 .0019  .0421 .0491 .0347
electronics  entmax                .0244 .0255 .0187  .0028 .0029 .0022  .0510 .0529 .0410
electronics  rankmax               .0218 .0225 .0145  .0025 .0026 .0018  .0461 .0472 .0331
electronics  sampled_softmax       .0236 .0246 .0147  .0028 .0028 .0018  .0509 .0525 .0336
electronics  nce                   .0238 .0232 .0150  .0029 .0028 .0018  .0528 .0520 .0339
electronics  hierarchical_softmax  .0134 .0129 .0123  .0016 .0015 .0014  .0297 .0283 .0267
electronics  rg                    .0274  .0030  .0563
gowalla      softmax               .0947 .0953 .0571  .0188 .0190 .0122  .1716 .1704 .0970
gowalla      sparsemax             .0782 .0948 .0992  .0150 .0180 .0203  .1375 .1636 .1739
gowalla      entmax                .0704 .0733 .0759  .0148 .0156 .0161  .1232 .1297 .1353
gowalla      rankmax               .1030 .1031 .0654  .0206 .0206 .0141  .1790 .1794 .1132
gowalla      sampled_softmax       .0848 .0816 .0539  .0173 .0169 .0116  .1522 .1458 .0955
gowalla      nce                   .0518 .0514 .0451  .0110 .0109 .0094  .0903 .0899 .0794
gowalla      hierarchical_softmax  .0512 .0496 .0464  .0114 .0111 .0104  .0938 .0915 .0845
gowalla      rg                    .0894  .0200  .1476
""",
    ),
    PaperTable(
        "sasrec_losses",
        "SASRec, learning rates",
        "sasrec",
        LEARNING_RATES,
        """
ml-1m        softmax               .1647 .1643 .1630  .0180 .0178 .0177  .3599 .3566 .3546
ml-1m        sparsemax             .1480 .1490 .0229  .0158 .0160 .0027  .3165 .3198 .0542
ml-1m        entmax                .0952 .0932 .0972  .0111 .0108 .0113  .2229 .2158 .2264
ml-1m        rankmax               .1753 .1789 .1729  .0185 .0188 .0183  .3695 .3756 .3667
ml-1m        sampled_softmax       .1524 .1501 .1486  .0171 .0169 .0166  .3428 .3385 .3319
ml-1m        nce                   .1274 .1325 .1281  .0153 .0158 .0151  .3062 .3158 .3029
electronics  softmax               .0355 .0351 .0348  .0036 .0036 .0036  .0728 .0727 .0723
electronics  sparsemax             .0170 .0246 .0117  .0020 .0027 .0014  .0399 .0540 .0276
electronics  entmax                .0171 .0172 .0167  .0020 .0020 .0019  .0398 .0407 .0389
electronics  rankmax               .0357 .0353 .0344  .0036 .0036 .0035  .0721 .0716 .0694
electronics  sampled_softmax       .0251 .0260 .0134  .0028 .0029 .0017  .0567 .0576 .0331
electronics  nce                   .0173 .0171 .0175  .0020 .0019 .0020  .0394 .0384 .0399
gowalla      softmax               .0459 .0470 .0462  .0048 .0049 .0049  .0968 .0988 .0977
gowalla      sparsemax             .0338 .0347 .0351  .0037 .0038 .0038  .0746 .0754 .0760
gowalla      entmax                .0154 .0154 .0153  .0017 .0017 .0017  .0337 .0336 .0338
gowalla      rankmax               .0469 .0467 .0474  .0049 .0049 .0050  .0984 .0983 .0993
gowalla      sampled_softmax       .0394 .0398 .0394  .0044 .0044 .0044  .0872 .0873 .0873
gowalla      nce                   .0309 .0304 .0262  .0035 .0034 .0029  .0702 .0684 .0581
""",
        note=ONE_TARGET,
    ),
    PaperTable(
        "lightgcn_ml1m",
        "LightGCN, learning rates",
        "lightgcn",
        LEARNING_RATES,
        """
ml-1m        softmax          .2279 .2150 .1268  .1316 .1239 .0740  .2488 .2194 .1281
ml-1m        sparsemax        .1695 .1496 .1226  .0983 .0881 .0748  .1755 .1544 .1278
ml-1m        entmax           .1208 .1207 .1212  .0731 .0731 .0734  .1272 .1272 .1280
ml-1m        rankmax          .1208 .1208 .1212  .0731 .0732 .0734  .1273 .1273 .1277
ml-1m        sampled_softmax  .2358 .2155 .1281  .1339 .1242 .0738  .2523 .2234 .1281
""",
        note="entmax and rankmax at every learning rate, and all losses at 1e-4, are at the popularity level",
    ),
    PaperTable(
        "mf_k_sweep",
        "MF, numbers of negatives",
        "mf",
        NEGATIVES,
        """
ml-1m        sampled_softmax  .2504 .2554 .2630 .2644  .1406 .1430 .1452 .1462  .2738 .2821 .2905 .2908
ml-1m        nce              .2403 .2410 .2409 .2423  .1360 .1360 .1362 .1374  .2643 .2650 .2681 .2661
electronics  sampled_softmax  .0235 .0237 .0245 .0246  .0028 .0028 .0028 .0028  .0514 .0516 .0520 .0525
electronics  nce              .0232 .0235 .0235 .0238  .0028 .0028 .0029 .0029  .0523 .0525 .0530 .0528
gowalla      sampled_softmax  .0611 .0675 .0806 .0848  .0129 .0143 .0167 .0173  .1074 .1197 .1450 .1522
gowalla      nce              .0514 .0515 .0516 .0518  .0109 .0110 .0109 .0110  .0893 .0900 .0899 .0903
""",
        note=MIXED,
    ),
    PaperTable(
        "sasrec_k_sweep",
        "SASRec, numbers of negatives",
        "sasrec",
        NEGATIVES,
        """
ml-1m        sampled_softmax  .0179 .1248 .1400 .1524  .0024 .0149 .0160 .0171  .0480 .2978 .3203 .3428
ml-1m        nce              .0174 .1024 .1291 .1325  .0024 .0124 .0153 .0158  .0474 .2473 .3064 .3158
electronics  sampled_softmax  .0148 .0170 .0231 .0260  .0016 .0017 .0024 .0029  .0320 .0344 .0485 .0576
electronics  nce              .0157 .0158 .0214 .0175  .0017 .0017 .0023 .0020  .0340 .0342 .0464 .0399
gowalla      sampled_softmax  .0301 .0308 .0368 .0398  .0033 .0034 .0041 .0044  .0668 .0689 .0824 .0873
gowalla      nce              .0270 .0261 .0292 .0309  .0029 .0028 .0030 .0035  .0584 .0561 .0595 .0702
""",
        note=f"{ONE_TARGET}; {MIXED}",
    ),
    PaperTable(
        "mf_q_choice",
        "MF, proposals",
        "mf",
        PROPOSALS,
        """
ml-1m        sampled_softmax  .2644 .2739  .1462 .1478  .2908 .2991
ml-1m        nce              .2423 .2769  .1374 .1498  .2661 .3002
electronics  sampled_softmax  .0246 .0255  .0028 .0029  .0525 .0536
electronics  nce              .0238 .0273  .0029 .0032  .0528 .0599
gowalla      sampled_softmax  .0848 .0908  .0173 .0180  .1522 .1651
gowalla      nce              .0514 .0599  .0110 .0129  .0903 .1048
""",
        note=MIXED,
    ),
    PaperTable(
        "sasrec_q_choice",
        "SASRec, proposals",
        "sasrec",
        PROPOSALS,
        """
ml-1m        sampled_softmax  .1524 .1570  .0171 .0176  .3428 .3497
ml-1m        nce              .1325 .1457  .0158 .0173  .3158 .3474
electronics  sampled_softmax  .0260 .0265  .0029 .0030  .0576 .0588
electronics  nce              .0175 .0201  .0020 .0024  .0399 .0459
gowalla      sampled_softmax  .0398 .0418  .0044 .0045  .0873 .0895
gowalla      nce              .0309 .0387  .0035 .0042  .0702 .0836
""",
        note=f"{ONE_TARGET}; {MIXED}",
    ),
)

# {(table, data, loss, metric, setting): what the paper prints for the same thing elsewhere}.
CONTRADICTED = {
    ("mf_q_choice", "gowalla", "nce", "ndcg@20", "uniform"): "0.0518 with k = 100 in two other tables",
}


def _numbers(table: PaperTable) -> Iterator[PaperNumber]:
    ((name, settings),) = table.columns.items()
    for row in table.rows.strip().splitlines():
        data, loss, *values = row.split()
        columns: tuple[float | str | None, ...] = settings if len(values) > len(PAPER_METRICS) else (None,)
        cells = [(metric, setting) for metric in PAPER_METRICS for setting in columns]
        for (metric, setting), value in zip(cells, values, strict=True):
            other = CONTRADICTED.get((table.name, data, loss, metric, str(setting)))
            yield PaperNumber(
                table=table.name,
                data=data,
                backbone=table.backbone,
                loss=loss,
                metric=metric,
                value=float(value),
                setting={} if setting is None else {name: setting},
                status="contradicted" if other else "printed",
                note="; ".join(filter(None, (other, table.note))),
            )


NUMBERS: tuple[PaperNumber, ...] = tuple(number for table in PAPER_TABLES for number in _numbers(table))
