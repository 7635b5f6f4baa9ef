"""Data that travel between services: blobs, the stream of samples, trajectories, the registry of replicas."""
