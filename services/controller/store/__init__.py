"""Stores jobs in Redis: records, events, metrics, samples, reward revisions; and which controller leads."""
