"""Learning curves of the recipes."""
