"""Studies with the losses: data, backbones, training, evaluation, grids of runs and their report."""
