"""How any loss runs: targets, options, blocks of scores, gradients, ranks, and what a member states about itself."""
