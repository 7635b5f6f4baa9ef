"""Judging by a vision-language model behind an OpenAI-compatible server.

rubrics, scale        what is asked, and how an answer becomes a number
messages, media       a rubric and samples as the body of a request
answers               the server's JSON as text and token probabilities
comparisons           pairs and rankings of a group as scores
limiter, breaker      when a server is asked: state machines without I/O
cache, failures       answers given before; the share that could not be read
servers, client       the driver around them: HTTP
"""
