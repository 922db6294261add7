"""LambdaRank, LambdaLoss and LambdaLoss@K, pairs weighted by their ranks: loss, kernel, facts and entry in `FAMILY`."""

from manymax.engine.member import Member
from manymax.members.lambda_loss.kernel import COST, lambda_kernel
from manymax.members.lambda_loss.loss import FACTS, FORMULAS, LOSS, RANK, SETTINGS, TAKES, LambdaLoss, lambda_loss

MEMBER = Member(
    name="lambda_loss",
    title="LambdaLoss@K",
    kind="exact",
    loss=lambda_loss,
    module=LambdaLoss,
    formulas=FORMULAS,
    facts=FACTS,
    settings=SETTINGS,
    # The default with a K below the number of classes of small examples; LambdaLoss@K; LambdaRank.
    examples=({"k": 2}, {"variant": LOSS, "k": 2, "sigma": 2.0}, {"variant": RANK, "k": 0}),
    takes=TAKES,
    joint=True,
    held="the ranks of the classes",
    native=True,
    kernel=lambda_kernel,
    unsharded="a rank needs the scores of all classes of a row, and ranks exchange sums alone",
    cost=COST,
    citation="Burges, Ragno, Le, NIPS 2006; Wang et al., CIKM 2018; Jagerman et al., SIGIR 2022",
)
