"""HTTP of the scorers that ask others: pooled connections, retries, turns, cached answers."""
