# The rewards without models of torch: one scorer a service. OCR's models are in the wheel of rapidocr.
# reward-models.Dockerfile has the others. `docker/build` passes IMAGE, IMPORTS and ABOUT of a scorer with a library of its
# own, from its scorer.toml.
ARG BASE=python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579

FROM ${BASE} AS packages
RUN echo 'flowfleet:x:10001:' >>/etc/group && echo 'flowfleet:x:10001:10001::/tmp:/usr/sbin/nologin' >>/etc/passwd
WORKDIR /app
ARG IMAGE=reward
COPY pyproject.toml LICENSE NOTICE requirements/images/${IMAGE}.txt ./
# The dependencies as they are pinned, then the project's metadata. pip is gone when the layer ends. Bytecode is made
# of what the service imports; at run time none can be written.
ARG IMPORTS="cv2, onnxruntime, rapidocr, shapely"
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/flowfleet && \
    mkdir /tmp/flowfleet && cp pyproject.toml LICENSE NOTICE /tmp/flowfleet && touch /tmp/flowfleet/README.md && \
    pip="/opt/pip/bin/pip --python /opt/flowfleet/bin/python" && \
    install="install --quiet --no-cache-dir --no-compile --no-deps" && \
    $pip $install --require-hashes --requirement ${IMAGE}.txt && $pip $install /tmp/flowfleet && $pip check && \
    rm -r /opt/pip /tmp/flowfleet && \
    /opt/flowfleet/bin/python -c "import \
        av, fsspec.implementations.local, grpc.aio, grpc_health.v1.health, httpx, numpy, prometheus_client, \
        pydantic, redis.asyncio, PIL.Image, ${IMPORTS}"

FROM packages
ENV PATH=/opt/flowfleet/bin:$PATH PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
ENTRYPOINT ["python", "-m", "services.reward"]
ARG VERSION=0.1.0
ARG IMAGE=reward
ARG ABOUT="rules, OCR and judges"
LABEL org.opencontainers.image.title="flowfleet-${IMAGE}" \
      org.opencontainers.image.description="The reward services of Flowfleet with ${ABOUT}" \
      org.opencontainers.image.version="${VERSION}"
COPY services/__init__.py services/
COPY flowfleet flowfleet
COPY services/reward services/reward
