"""Rollout engines. `base.RolloutEngine` is the interface; each other module is an engine, imported only when chosen."""
