"""A rank as a replica of its own job (`trainer.samples`): the rollout's service around the weights that it holds."""
