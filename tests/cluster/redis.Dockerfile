# Redis for test clusters that reach no registry. Elsewhere the official image does.
ARG BASE=python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579
FROM ${BASE}
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends redis-server >/dev/null && rm -rf /var/lib/apt/lists/*
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["redis-server"]
