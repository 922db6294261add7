"""RG: its loss, kernel, facts, theory and alternating least squares, and its entry in `FAMILY`."""

from manymax.engine.member import Member, Solver
from manymax.members.rg.als import SETTINGS, RGFactorization
from manymax.members.rg.kernel import cost, rg_kernel, traffic
from manymax.members.rg.loss import FACTS, FORMULAS, RGLoss, foundation, rg, rg_loss
from manymax.members.rg.theory import THEORY

MEMBER = Member(
    name="rg",
    title="RG (quadratic log partition)",
    kind="quadratic",
    class_name="RG",
    map=rg,
    loss=rg_loss,
    module=RGLoss,
    foundation=foundation,
    formulas=FORMULAS,
    facts=FACTS,
    kernel=rg_kernel,
    cost=cost,
    traffic=traffic,
    theory=THEORY,
    solvers={"als": Solver(RGFactorization, SETTINGS)},
    citation="Pu et al., ICML 2024",
)
