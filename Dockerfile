# pytorch-cuda:v2.6 — os → cuda → torch → tools → final, then test on top of final.
# Layers stand in the order of how rarely they change and how large they are: a new Jupyter does not re-pull torch.
# There is no `# syntax=` line: it would fetch the frontend from a registry, and this must build where none is reached.
ARG BASE_IMAGE=debian:trixie-slim
# Chooses a folder of locks, requirements/torch-${TORCH}: all that another PyTorch needs.
ARG TORCH=2.6.0

FROM ${BASE_IMAGE} AS os
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV LANG=C.UTF-8
# Versions are not pinned here: Debian's stable release is the pin, and a security update must be able to come in.
# hadolint ignore=DL3003,DL3008
RUN --mount=type=cache,id=apt-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=cache,id=apt-archives,target=/var/cache/apt,sharing=locked \
    --mount=type=secret,id=ca_certificates \
    --mount=type=bind,source=container/build/prune-os,target=/tmp/prune-os \
    rm -f /etc/apt/apt.conf.d/docker-clean \
 && apt() { DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::https::CaInfo="$(ls /run/secrets/ca_certificates 2>/dev/null)" "$@"; } \
 && apt update \
 && apt install -y --no-install-recommends \
        bash-completion ca-certificates curl git htop iproute2 less nano netbase openssh-client openssh-server \
        procps psmisc rsync tini tmux tree unzip vim-tiny wget xz-utils zip \
        python3 python3-dev python3-venv systemd-standalone-sysusers \
        gcc g++ make libc6-dev \
        libnss-extrausers \
        fonts-wqy-microhei git-lfs kitty-terminfo ncurses-term tzdata tzdata-legacy \
        libglib2.0-0t64 libsm6 libx11-6 libxcb1 libxext6 \
    # What `import cv2` links (opencv-python, runpod/containers#8). libgl1 by apt brings Mesa and LLVM, 211 MB, to draw on
    # a screen that is not here; of GL only the dispatching libraries are taken, to which a driver can still be added.
 && (cd /tmp && apt download libegl1 libgl1 libglvnd0 libglx0 libopengl0 \
     && for package in ./*.deb; do dpkg-deb --extract "$package" /; done && rm ./*.deb && ldconfig) \
    # Ghostty calls itself xterm-ghostty; ncurses knows it as ghostty.
 && ln -sf ../g/ghostty /usr/share/terminfo/x/xterm-ghostty \
    # gcc, g++ and Python.h are for torch.compile and Triton (pytorch#116696): without them it fails at first use.
 && /tmp/prune-os \
 && rm -f /etc/ssh/ssh_host_* /var/log/*.log /var/log/apt/* /var/cache/ldconfig/aux-cache \
    # Nothing here needs setuid: there is no sudo, and who may become whom is decided once, at the container's start.
 && find / -xdev -type f -perm /6000 -exec chmod a-s {} +

FROM os AS installer
COPY requirements/build.lock /requirements/
RUN --mount=type=cache,id=pip,target=/root/.cache/pip,sharing=locked \
    --mount=type=secret,id=ca_certificates --mount=type=secret,id=index_url \
    if [[ -s /run/secrets/ca_certificates ]]; then export PIP_CERT=/run/secrets/ca_certificates; fi \
 && if [[ -s /run/secrets/index_url ]]; then PIP_INDEX_URL=$(</run/secrets/index_url); export PIP_INDEX_URL; fi \
 && python3 -m venv /installer \
 && /installer/bin/pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: \
        -r /requirements/build.lock

FROM os AS cuda
ARG TORCH
# The user's packages (~/.local) are visible in the venv because of --system-site-packages, behind the image's own:
# so `pip install` works for a user who may not write to /opt/venv, and can't put another torch in front of ours.
RUN --mount=from=installer,source=/installer,target=/installer \
    /installer/bin/uv venv --quiet --no-config --python /usr/bin/python3 --system-site-packages /opt/venv
RUN --mount=from=installer,source=/installer,target=/installer \
    --mount=type=bind,source=requirements/torch-${TORCH}/cuda.lock,target=/requirements/cuda.lock \
    --mount=type=bind,source=container/build/install-lock,target=/build/install-lock \
    --mount=type=bind,source=container/build/prune-cuda,target=/build/prune-cuda \
    --mount=type=cache,id=uv,target=/root/.cache/uv,sharing=locked \
    --mount=type=secret,id=ca_certificates --mount=type=secret,id=index_url \
    /build/install-lock /requirements/cuda.lock && /build/prune-cuda

FROM cuda AS torch
ARG TORCH
RUN --mount=from=installer,source=/installer,target=/installer \
    --mount=type=bind,source=requirements/torch-${TORCH}/torch.lock,target=/requirements/torch.lock \
    --mount=type=bind,source=container/build/install-lock,target=/build/install-lock \
    --mount=type=bind,source=container/build/prune-torch,target=/build/prune-torch \
    --mount=type=bind,source=container/build/prune-tests,target=/build/prune-tests \
    --mount=type=cache,id=uv,target=/root/.cache/uv,sharing=locked \
    --mount=type=secret,id=ca_certificates --mount=type=secret,id=index_url \
    /build/install-lock /requirements/torch.lock && /build/prune-torch

FROM torch AS tools
ARG TORCH
RUN --mount=from=installer,source=/installer,target=/installer \
    --mount=type=bind,source=requirements/torch-${TORCH}/tools.lock,target=/requirements/tools.lock \
    --mount=type=bind,source=container/build/install-lock,target=/build/install-lock \
    --mount=type=bind,source=container/build/prune-tools,target=/build/prune-tools \
    --mount=type=bind,source=container/build/prune-tests,target=/build/prune-tests \
    --mount=type=cache,id=uv,target=/root/.cache/uv,sharing=locked \
    --mount=type=secret,id=ca_certificates --mount=type=secret,id=index_url \
    /build/install-lock /requirements/tools.lock && /build/prune-tools

FROM tools AS final
ARG TORCH
# NVIDIA_VISIBLE_DEVICES stays unset: in the image it would hand every GPU to every container where nvidia is the default
# runtime. cuda>=12.0, not 12.4: drivers from 525 on run cu124 wheels. PYTORCH_VERSION wakes enroot's Slurm hook.
# TORCH_DISABLE_…: else torchrun keeps the address of the first rank 0's store for good, and ranks that it starts again
# after a death never meet.
ENV PATH=/opt/venv/bin:/home/dev/.local/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin \
    VIRTUAL_ENV=/opt/venv \
    SHELL=/bin/bash \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA="cuda>=12.0" \
    PIP_CONSTRAINT=/opt/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    UV_CONSTRAINT=/opt/constraints.txt \
    PYTORCH_VERSION=${TORCH} \
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
COPY container/etc/ /etc/
COPY --chmod=755 container/build/finish /tmp/finish
RUN --mount=type=bind,source=requirements/torch-${TORCH},target=/requirements /tmp/finish && rm /tmp/finish
COPY entrypoints/ /opt/entrypoints/
COPY workspace/ /opt/workspace/
COPY --chown=1000:1000 workspace/ /workspace/
RUN python -m compileall -q /opt/entrypoints /opt/workspace/amptrain
# Which image this is. Last, since the commit changes most often; host/build.py knows it, `docker compose build` does not.
ARG REVISION=unknown
ARG RELEASE=unknown
ARG LOCKS=unknown
LABEL org.opencontainers.image.title="pytorch-cuda" \
      org.opencontainers.image.description="PyTorch ${TORCH} with CUDA, JupyterLab and sshd; mixed-precision training done right" \
      org.opencontainers.image.version="${RELEASE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="MIT" \
      pytorch-cuda.locks="${LOCKS}" \
      # VS Code's "Attach to Running Container", and a dev container on this image: as `dev`, prepared by the entrypoint.
      devcontainer.metadata='[{"remoteUser": "dev", "overrideCommand": false, "customizations": {"vscode": {"extensions": ["ms-python.python", "ms-toolsai.jupyter", "charliermarsh.ruff"], "settings": {"python.defaultInterpreterPath": "/opt/venv/bin/python", "python.analysis.extraPaths": ["/workspace"]}}}}]'
RUN echo "REVISION=${REVISION}" >> /opt/versions.env
WORKDIR /workspace
EXPOSE 8888 2222
# No --start-interval: Docker before 25 and buildah (1.28 of Debian 12) refuse it. A check takes 0.16 s of a CPU: 3 % at 5 s.
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=6 \
    CMD ["/usr/bin/python3", "-I", "/opt/entrypoints", "health"]
# -s: below another init (docker run --init, Apptainer) tini reaps as it does as PID 1, and does not complain.
ENTRYPOINT ["/usr/bin/tini", "-sg", "--", "/usr/bin/python3", "-I", "/opt/entrypoints"]
CMD ["jupyter"]

FROM final AS test
ARG TORCH
RUN --mount=from=installer,source=/installer,target=/installer \
    --mount=type=bind,source=requirements/torch-${TORCH}/test.lock,target=/requirements/test.lock \
    --mount=type=bind,source=container/build/install-lock,target=/build/install-lock \
    --mount=type=cache,id=uv,target=/root/.cache/uv,sharing=locked \
    --mount=type=secret,id=ca_certificates --mount=type=secret,id=index_url \
    /build/install-lock /requirements/test.lock

# .devcontainer: prepared like any other start, and then nothing but the editor's own server.
FROM final AS devcontainer
CMD ["sleep", "infinity"]

FROM final
