"""What a job tells of itself: events, metrics, samples, the card of its model."""
