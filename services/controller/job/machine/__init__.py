"""The state machine of a job, pure: events in, commands out; the ledger that keeps its events."""
