"""Work shared by all ranks: their process group, the sharding of a transformer, its blocks."""
