# The controller of compose.yaml: starts trainers as processes beside it, so it is the trainer's image with the
# controller's dependencies and code.
ARG TRAINER=flowfleet-trainer:0.1.0

FROM ${TRAINER} AS packages
USER 0
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/pip && \
    mkdir /tmp/flowfleet && cp pyproject.toml LICENSE NOTICE /tmp/flowfleet && touch /tmp/flowfleet/README.md && \
    /opt/pip/bin/pip --python /opt/flowfleet/bin/python install --quiet --no-cache-dir --no-compile \
        "/tmp/flowfleet[controller]" && \
    rm -r /opt/pip /tmp/flowfleet && install -d -o 10001 -g 10001 /var/lib/flowfleet

FROM packages
USER 10001:10001
ENTRYPOINT ["python", "-m", "services.controller"]
LABEL org.opencontainers.image.title="flowfleet-local" \
      org.opencontainers.image.description="The control plane of Flowfleet with the trainer beside it"
COPY services/controller services/controller
