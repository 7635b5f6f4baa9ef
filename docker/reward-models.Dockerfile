# The rewards whose scorers run a model, and all others too; or one scorer with a library of its own, as `docker/build`
# passes the arguments IMAGE to ABOUT from its scorer.toml.
# The stage torch is word for word that of rollout.Dockerfile, so that builds, registries and nodes hold it once. The
# defaults are for NVIDIA GPUs. For Ascend NPUs BASE is an image of CANN, and TORCH has torch-npu too
# (`DEVICE=ascend docker/build`); that has not been built, for lack of such an image.
ARG BASE=python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579

FROM ${BASE} AS torch
# On CUDA, Triton and FlashInfer compile kernels when they are first used; NCCL loads the libraries of RDMA.
ARG PACKAGES="g++ ibverbs-providers libibverbs1 librdmacm1"
RUN echo 'flowfleet:x:10001:' >>/etc/group && echo 'flowfleet:x:10001:10001::/tmp:/usr/sbin/nologin' >>/etc/passwd && \
    if [ -n "${PACKAGES}" ]; then apt-get update -qq && \
    apt-get install -qq -y --no-install-recommends ${PACKAGES} >/dev/null && rm -rf /var/lib/apt/lists/*; fi
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX
# pip is gone when the layer ends. Bytecode is made of what services import; at run time none can be written.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/flowfleet && \
    /opt/pip/bin/pip --python /opt/flowfleet/bin/python install --quiet --no-cache-dir --no-compile \
        ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} ${TORCH} && \
    rm -rf /opt/pip /opt/flowfleet/lib/python3.*/site-packages/torch/test && \
    /opt/flowfleet/bin/python -c "import \
        torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.run"

FROM torch AS packages
WORKDIR /app
ARG IMAGE=reward-models
COPY pyproject.toml LICENSE NOTICE requirements/images/${IMAGE}.txt ./
# torchvision of the same build as torch, the other dependencies as they are pinned, then the project's metadata. WITHOUT
# is what a library names but its scorer does not import, with "|" between.
ARG TORCHVISION
ARG TORCH_INDEX
ARG WITHOUT
ARG IMPORTS="cv2, onnxruntime, rapidocr, safetensors, shapely, \
    transformers.models.auto.image_processing_auto, transformers.models.clip.modeling_clip"
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/pip && \
    mkdir /tmp/flowfleet && cp pyproject.toml LICENSE NOTICE /tmp/flowfleet && touch /tmp/flowfleet/README.md && \
    pip="/opt/pip/bin/pip --python /opt/flowfleet/bin/python" && \
    install="install --quiet --no-cache-dir --no-compile --no-deps" && \
    { [ -z "${TORCHVISION}" ] || $pip $install ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} ${TORCHVISION}; } && \
    $pip $install --require-hashes --requirement ${IMAGE}.txt && $pip $install /tmp/flowfleet && \
    { $pip check || [ -z "$($pip check | grep -vE "requires (${WITHOUT:-none}), which is not installed")" ]; } && \
    rm -r /opt/pip /tmp/flowfleet && \
    /opt/flowfleet/bin/python -c "import \
        av, fsspec.implementations.local, grpc.aio, grpc_health.v1.health, httpx, numpy, prometheus_client, \
        pydantic, redis.asyncio, PIL.Image, ${IMPORTS}"

FROM packages
ENV PATH=/opt/flowfleet/bin:$PATH PYTHONPATH=/app${PYTHONPATH:+:$PYTHONPATH} \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp HF_HUB_OFFLINE=1
USER 10001:10001
ENTRYPOINT ["python", "-m", "services.reward"]
ARG VERSION=0.1.0
ARG IMAGE=reward-models
ARG ABOUT=models
LABEL org.opencontainers.image.title="flowfleet-${IMAGE}" \
      org.opencontainers.image.description="The reward services of Flowfleet with ${ABOUT}" \
      org.opencontainers.image.version="${VERSION}"
COPY services/__init__.py services/
COPY flowfleet flowfleet
COPY services/reward services/reward
