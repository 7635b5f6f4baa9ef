"""A reward service: one scorer behind the contract of rewards.

server        checks a call, answers with one outcome a sample
execution/    runs the scorer: batches, decoding, processes
scorer        defines a scorer
scorers/      a folder a scorer: its code, and scorer.toml with its score, image and library
answers, text, bradley_terry    shared by scorers: references of answers, quoted text, strengths from comparisons
networks/     shared by scorers around models: checkpoints, devices, gradients, libraries
judge/        asks vision-language models; calls/ is the way to their servers
remote/       HTTP of scorers that ask others: connections, retries, cached answers
"""
