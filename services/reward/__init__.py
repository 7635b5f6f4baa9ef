"""A reward service: one scorer behind the contract of rewards.

server        checks a call, answers with one outcome a sample
execution/    who runs the scorer: batches, decoding, processes
remote/       HTTP of scorers that ask others: connections, retries, cached answers
scorer        what a scorer is
scorers/      those there are: networks/ around models, reading/ of text
judge/        asking vision-language models; calls/ is the way to their servers
"""
