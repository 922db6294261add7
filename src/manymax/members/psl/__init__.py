"""PSL, the pairwise softmax loss: its map, loss, kernel and facts, and its entry in `FAMILY`."""

from manymax.engine.member import Member
from manymax.members.psl.kernel import COST, TRAFFIC, psl_kernel
from manymax.members.psl.loss import FACTS, FORMULAS, SETTINGS, TAKES, PslLoss, psl, psl_loss

MEMBER = Member(
    name="psl",
    title="PSL",
    kind="exact",
    map=psl,
    loss=psl_loss,
    module=PslLoss,
    formulas=FORMULAS,
    facts=FACTS,
    settings=SETTINGS,
    # One of each g.
    examples=(
        {"activation": "relu", "tau": 0.4},
        {"activation": "tanh", "tau": 0.25},
        {"activation": "atan", "tau": 0.3},
    ),
    takes=TAKES,
    needs_label=True,
    native=True,
    log_partition=True,
    statistics=("nll", "target_prob"),
    kernel=psl_kernel,
    cost=COST,
    traffic=TRAFFIC,
    citation="Yang et al., PSL, NeurIPS 2024",
)
