"""Softmax cross entropy: its map, loss, kernel, facts and closed forms, and its entry in `FAMILY`."""

from manymax.engine.member import Member
from manymax.members.softmax.kernel import COST, TRAFFIC, softmax_kernel
from manymax.members.softmax.loss import FACTS, FORMULAS, SoftmaxLoss, foundation, softmax, softmax_loss
from manymax.members.softmax.theory import THEORY

MEMBER = Member(
    name="softmax",
    title="Softmax cross entropy",
    kind="exact",
    map=softmax,
    loss=softmax_loss,
    module=SoftmaxLoss,
    foundation=foundation,
    formulas=FORMULAS,
    log_partition=True,
    statistics=("nll", "log_z", "entropy", "target_prob", "support"),
    facts=FACTS,
    native=True,
    kernel=softmax_kernel,
    cost=COST,
    traffic=TRAFFIC,
    theory=THEORY,
    citation="Bridle 1990; as a Fenchel-Young loss: Blondel, Martins, Niculae, JMLR 2020",
)
