"""Weights from rank 0 to the replicas."""
