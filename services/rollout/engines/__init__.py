"""What samples: `base.RolloutEngine` is the interface, each other module an engine, imported only when it is chosen."""
