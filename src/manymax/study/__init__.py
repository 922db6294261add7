"""The laboratory around the library: data, backbones, training, evaluation, studies and their report."""
