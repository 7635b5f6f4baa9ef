"""Speed and memory of rollout, trainer, publication and the whole loop."""
