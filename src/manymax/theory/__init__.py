"""Measurements on any member of the family: each statement of the theory a function, checked against what is found.

order           does a map keep the order of the scores
consistency     does the minimiser of a risk rank as a metric wants
bregman         Fenchel-Young losses against Bregman divergences
jacobian        curvature: Jacobians, their norms and bounds
rates           what curvature means for gradient descent on a linear head
bias_variance   how far an approximation is from the softmax loss
gradients       ties, and which classes get a signal
cost            what a step costs

Formulas that one member has alone stand in its folder and are fields of its record, `Member.theory`.
"""
