"""Float8 linears of a transformer's blocks, the same code in rollouts and trainer: rows, products, layers."""
