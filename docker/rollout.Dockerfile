# A replica of a rollout pool: one model on one accelerator.
# The stages torch and packages are word for word those of trainer.Dockerfile, so that builds, registries and nodes hold
# them once. The defaults are for NVIDIA GPUs. For Ascend NPUs BASE is an image of CANN, and TORCH has torch-npu too
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
COPY pyproject.toml LICENSE NOTICE requirements/images/rollout.txt ./
# The other dependencies as they are pinned, then the project's metadata.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/pip && \
    mkdir /tmp/flowfleet && cp pyproject.toml LICENSE NOTICE /tmp/flowfleet && touch /tmp/flowfleet/README.md && \
    pip="/opt/pip/bin/pip --python /opt/flowfleet/bin/python" && \
    install="install --quiet --no-cache-dir --no-compile --no-deps" && \
    $pip $install --require-hashes --requirement rollout.txt && $pip $install /tmp/flowfleet && $pip check && \
    rm -r /opt/pip /tmp/flowfleet && \
    /opt/flowfleet/bin/python -c "import \
        accelerate, av, fsspec.implementations.local, grpc.aio, grpc_health.v1.health, httpx, numpy, \
        prometheus_client, pydantic, redis.asyncio, peft, PIL.Image, transformers; \
        from diffusers import QwenImagePipeline"

FROM packages AS engine
# vLLM-Omni for "cuda", as it is pinned, or for "cpu", as `make vllm-omni` installs it, or nothing. OpenCV is the headless
# build, which needs no libraries of a desktop.
ARG VLLM_OMNI=cuda
COPY requirements requirements
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    [ -n "${VLLM_OMNI}" ] || exit 0; \
    python3 -m venv /opt/pip && pip="/opt/pip/bin/pip --python /opt/flowfleet/bin/python" && \
    install="install --quiet --no-cache-dir --no-compile --no-deps" && \
    case "${VLLM_OMNI}" in \
    cuda) $pip $install --require-hashes --requirement requirements/images/vllm-omni.txt && \
        { $pip check || [ -z "$($pip check | grep -v 'requires opencv-python, which is not installed')" ]; } && \
        /opt/flowfleet/bin/python -c "import cv2, vllm, vllm_omni" ;; \
    cpu) $pip $install setuptools --requirement requirements/vllm-omni-cpu.txt && \
        version=$(sed -n 's/^vllm-omni==//p' requirements/vllm-omni-cpu.txt) && \
        VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version \
        $pip $install --no-build-isolation --no-binary vllm vllm==$version ;; \
    *) echo "VLLM_OMNI=${VLLM_OMNI}: use cuda, cpu or nothing" >&2; exit 2 ;; esac && rm -r /opt/pip

FROM engine
ENV PATH=/opt/flowfleet/bin:$PATH PYTHONPATH=/app${PYTHONPATH:+:$PYTHONPATH} \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp HF_HUB_OFFLINE=1
USER 10001:10001
ENTRYPOINT ["python", "-m", "services.rollout"]
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="flowfleet-rollout" \
      org.opencontainers.image.description="A rollout replica of Flowfleet" \
      org.opencontainers.image.version="${VERSION}"
COPY recipes recipes
COPY services/__init__.py services/
COPY flowfleet flowfleet
COPY services/rollout services/rollout
