"""People's votes: which pair is shown next, what votes come to, and preferences made of them. Pure."""
