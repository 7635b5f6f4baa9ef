# The controller of compose.yaml: starts trainers as processes beside it, so it is the trainer's image with the
# controller's dependencies and code.
ARG TRAINER=flowfleet-trainer:0.1.0

FROM ${TRAINER} AS packages
USER 0
COPY requirements/images/controller.txt ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/pip && \
    /opt/pip/bin/pip --python /opt/flowfleet/bin/python install --quiet --no-cache-dir --no-compile --no-deps \
        --require-hashes --requirement controller.txt && \
    rm -r /opt/pip && install -d -o 10001 -g 10001 /var/lib/flowfleet

FROM packages
USER 10001:10001
ENTRYPOINT ["python", "-m", "services.controller"]
LABEL org.opencontainers.image.title="flowfleet-local" \
      org.opencontainers.image.description="The control plane of Flowfleet with the trainer beside it"
COPY services/controller services/controller
