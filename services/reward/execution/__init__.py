"""Runs scorers in threads or processes: forms batches, decodes media, and limits the work at once."""
