"""Benchmarks that anyone can run: README.md has a table of them."""
