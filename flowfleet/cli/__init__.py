"""The `flowfleet` command; `main` has its commands."""
