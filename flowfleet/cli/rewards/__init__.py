"""`flowfleet rewards` and `flowfleet check-reward`."""
