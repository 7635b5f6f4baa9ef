# Redis for test clusters that reach no registry. Elsewhere the official image does.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends redis-server >/dev/null && rm -rf /var/lib/apt/lists/*
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["redis-server"]
