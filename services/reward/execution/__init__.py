"""Who runs a scorer, how much of it at once, and what passes between: batches, decoded media, processes."""
