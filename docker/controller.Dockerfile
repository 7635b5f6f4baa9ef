# The control plane: REST, jobs, KEDA's scaler. Without torch and CUDA.
ARG BASE=python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579

FROM ${BASE} AS packages
RUN echo 'flowfleet:x:10001:' >>/etc/group && echo 'flowfleet:x:10001:10001::/tmp:/usr/sbin/nologin' >>/etc/passwd
WORKDIR /app
COPY pyproject.toml LICENSE NOTICE requirements/images/controller.txt ./
# The dependencies as they are pinned, then the project's metadata. pip is gone when the layer ends. Bytecode is made
# of what the service imports; at run time none can be written.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/flowfleet && \
    mkdir /tmp/flowfleet && cp pyproject.toml LICENSE NOTICE /tmp/flowfleet && touch /tmp/flowfleet/README.md && \
    pip="/opt/pip/bin/pip --python /opt/flowfleet/bin/python" && \
    install="install --quiet --no-cache-dir --no-compile --no-deps" && \
    $pip $install --require-hashes --requirement controller.txt && $pip $install /tmp/flowfleet && $pip check && \
    rm -r /opt/pip /tmp/flowfleet && \
    /opt/flowfleet/bin/python -c "import \
        av, fastapi, fsspec.implementations.local, grpc.aio, grpc_health.v1.health, httpx, kubernetes.aio.client, \
        kubernetes.aio.config, numpy, \
        prometheus_client, pydantic, redis.asyncio, PIL.Image, typer, uvicorn.protocols.http.h11_impl"

FROM packages
ENV PATH=/opt/flowfleet/bin:$PATH PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp HF_HUB_OFFLINE=1
USER 10001:10001
ENTRYPOINT ["python", "-m", "services.controller"]
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="flowfleet-controller" \
      org.opencontainers.image.description="The control plane of Flowfleet" \
      org.opencontainers.image.version="${VERSION}"
COPY recipes recipes
COPY services/__init__.py services/
COPY flowfleet flowfleet
COPY services/controller services/controller
