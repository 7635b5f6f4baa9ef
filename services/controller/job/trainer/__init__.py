"""The trainer of one job: calls to it, and how long it may be silent."""
