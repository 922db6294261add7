"""Hierarchical softmax: its loss, head, facts and theory, and its entry in `FAMILY`."""

from manymax.engine.member import Member
from manymax.members.hierarchical_softmax.facts import FACTS, FORMULAS, cost, mean_code_length
from manymax.members.hierarchical_softmax.head import (
    LinearHierarchicalSoftmaxLoss,
    linear_hierarchical_softmax_loss,
)
from manymax.members.hierarchical_softmax.loss import HierarchicalSoftmaxLoss, hierarchical_softmax_loss
from manymax.members.hierarchical_softmax.theory import THEORY

MEMBER = Member(
    name="hierarchical_softmax",
    title="Hierarchical softmax",
    kind="tree",
    loss=hierarchical_softmax_loss,
    module=HierarchicalSoftmaxLoss,
    aliases=("hsm",),
    formulas=FORMULAS,
    facts=FACTS,
    unsharded="its vectors belong to the nodes of a tree, and every path begins at the same few of them",
    head=LinearHierarchicalSoftmaxLoss,
    head_function=linear_hierarchical_softmax_loss,
    cost=cost,
    path_length=mean_code_length,
    theory=THEORY,
    citation="Morin and Bengio, AISTATS 2005; on Huffman's tree: Mikolov et al., NeurIPS 2013",
)

LinearHierarchicalSoftmaxLoss.member = MEMBER
