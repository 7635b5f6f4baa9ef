"""`flowfleet try-reward`: scores pictures, or a job's samples, by the reward service that a job would call."""
