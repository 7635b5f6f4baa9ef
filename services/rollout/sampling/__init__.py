"""One request on its way: checked, its media fetched, sampled, published."""
