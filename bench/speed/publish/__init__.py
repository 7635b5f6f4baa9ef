"""How long weights take from a trainer to rollouts: `python -m bench.speed.publish`."""
