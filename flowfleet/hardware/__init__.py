"""Accelerators: which there are, and the one place that names them."""
