"""Weights on their way from trainer to replicas: names, hashes, buckets, transfer groups, LoRA adapters."""
