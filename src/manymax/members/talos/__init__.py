"""Talos, a softmax of scores that are cut off above the top K: loss, kernel, facts and its entry in `FAMILY`."""

from manymax.engine.member import Member
from manymax.members.talos.kernel import COST, TRAFFIC, talos_kernel
from manymax.members.talos.loss import FACTS, FORMULAS, SETTINGS, TAKES, TalosLoss, talos, talos_loss
from manymax.members.talos.theory import THEORY

MEMBER = Member(
    name="talos",
    title="Talos",
    kind="exact",
    map=talos,
    loss=talos_loss,
    module=TalosLoss,
    formulas=FORMULAS,
    facts=FACTS,
    settings=SETTINGS,
    examples=({"k": 3, "tau": 0.5},),
    takes=TAKES,
    log_partition=True,
    held="the K-th largest score of a row",
    bounded=True,
    statistics=("nll", "log_z", "entropy", "target_prob", "support"),
    kernel=talos_kernel,
    cost=COST,
    traffic=TRAFFIC,
    theory=THEORY,
    citation="Zhang et al., Talos: optimizing top-K accuracy, WWW 2026",
)
