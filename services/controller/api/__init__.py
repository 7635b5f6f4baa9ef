"""REST: routes by what they are about, and what stands before each of them."""
