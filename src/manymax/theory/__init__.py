"""Measurements on any member of the family. Each statement of the theory is a function whose result can be checked.

order_preservation   whether a map keeps the order of the scores
label_laws           distributions of label sets, and ranking metrics in expectation over them
risk                 the conditional risk of a member, and the scores that minimise it
consistency          whether these scores rank the classes as a metric wants
bregman              Fenchel-Young losses against Bregman divergences
jacobian             curvature: Jacobians, their norms and bounds
rates                what curvature means for gradient descent on a linear head
approximations       which members approximate the softmax loss
bias_variance        how far such an approximation is from the softmax loss
inputs               checks of the arguments of `bias_variance`
gradient_deviation   how far the gradients of sampled losses are from the exact one
gradients            what ties cost a ranking, and which classes get a gradient
cost                 what a training step costs

A formula that belongs to one member is in that member's folder and is a field of `Member.theory`.
"""
