"""Which settings go together: `rules` is asked for every job, and asks the other modules."""
