"""Code shared by scorers around models: checkpoints, devices, gradients by pixels, libraries of other projects."""
