"""BSL, the bilateral softmax loss: its loss, kernel and facts, and its entry in `FAMILY`."""

from manymax.engine.member import Member
from manymax.members.bsl.kernel import COST, TRAFFIC, bsl_kernel
from manymax.members.bsl.loss import FACTS, FORMULAS, SETTINGS, TAKES, BslLoss, bsl_loss

MEMBER = Member(
    name="bsl",
    title="BSL",
    kind="exact",
    loss=bsl_loss,
    module=BslLoss,
    formulas=FORMULAS,
    facts=FACTS,
    settings=SETTINGS,
    # The mean of the probabilities; nearly the best positive alone; nearly the mean of the losses.
    examples=({"tau": 1.0}, {"tau": 0.1}, {"tau": 8.0}),
    takes=TAKES,
    joint=True,
    native=True,
    log_partition=True,
    kernel=bsl_kernel,
    cost=COST,
    traffic=TRAFFIC,
    citation="Wu et al., BSL, ICDE 2024",
)
