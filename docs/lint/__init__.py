"""Lints of the pages and of the prose in code. `make lint` runs them all."""
