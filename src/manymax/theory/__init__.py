"""The paper's theory as code: each statement a function, each number checked against measurement.

order           does a map keep the order of the scores
consistency     does the minimiser of a risk rank as a metric wants
bregman         Fenchel-Young losses against Bregman divergences
jacobian        curvature: Jacobians, their norms and bounds
rates           what curvature means for gradient descent on a linear head
bias_variance   how far an approximation is from the softmax loss
gradients       ties, and which classes get a signal
cost            what a step costs
evidence        measurements that re-run a statement
claims          every cell of the paper's tables, re-run
"""
