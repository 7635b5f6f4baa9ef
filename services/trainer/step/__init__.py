"""One training step: its request, batches, updates and metrics; objectives/ is what a loss trains on."""
