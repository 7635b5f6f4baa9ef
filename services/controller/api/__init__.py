"""REST: the routes, and what stands before each of them."""
