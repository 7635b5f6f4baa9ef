"""Reports of a job: events, metrics, samples, the card of its model."""
