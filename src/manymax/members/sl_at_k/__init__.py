"""SL@K, softmax with gates that favour positives near the top: loss, kernel, facts and its entry in `FAMILY`."""

from manymax.engine.member import Member
from manymax.members.sl_at_k.kernel import COST, TRAFFIC, sl_at_k_kernel
from manymax.members.sl_at_k.loss import FACTS, FORMULAS, SETTINGS, TAKES, SlAtKLoss, sl_at_k, sl_at_k_loss
from manymax.members.sl_at_k.theory import THEORY

MEMBER = Member(
    name="sl_at_k",
    title="SL@K",
    kind="exact",
    map=sl_at_k,
    loss=sl_at_k_loss,
    module=SlAtKLoss,
    formulas=FORMULAS,
    facts=FACTS,
    settings=SETTINGS,
    # A K below the number of classes of small examples: beyond that it is softmax.
    examples=({"k": 2, "gate_temperature": 2.0},),
    takes=TAKES,
    log_partition=True,
    held="the K-th largest score of a row",
    bounded=True,
    statistics=("nll", "log_z", "entropy", "target_prob", "support"),
    kernel=sl_at_k_kernel,
    cost=COST,
    traffic=TRAFFIC,
    theory=THEORY,
    citation="Yang et al., Breaking the top-K barrier, KDD 2025",
)
