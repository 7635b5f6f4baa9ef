"""What all ranks share: their group, how a transformer is spread over them, its blocks."""
