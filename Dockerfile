# mirror for machines with NVIDIA GPUs; torch brings CUDA, the machine its driver and the
# NVIDIA Container Toolkit:
#
#     docker build --tag mirror .
#     docker run --rm --gpus all --shm-size 1g mirror doctor
#
# The manifests of deploy/ start programs of the target "examples", which is the last one: they are
# in /program/examples. Those that need Ray want the library, too: --build-arg EXTRAS=examples,ray.
# The target "package" has mirror alone, for your own programs.
#
# For a build that can be repeated: --build-arg BASE=python@sha256:..., the digest of the base.
#
# For CUDA 12: --build-arg CUDA=cu12 --build-arg PIP_EXTRA_INDEX_URL=URL, the index of torch for
# CUDA 12 that https://pytorch.org/get-started/locally names.

ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY benchmarks benchmarks
COPY csrc csrc
COPY mirror mirror
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE} AS package
# tini as process 1 passes signals on, and ends processes that nobody waits for.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini=0.19.* \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH=2.13.0
ARG CUDA=cu13
# What the examples need, by the names in pyproject.toml.
ARG EXTRAS=examples
# pip reads it. A version for a CUDA version (2.13.0+cu126) comes before one that names none.
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir "torch==${TORCH}"
COPY --from=build /wheels /wheels
# The version once more, so that no extra can pull another torch.
RUN pip install --no-cache-dir "torch==${TORCH}" "$(echo /wheels/*.whl)[${CUDA},${EXTRAS}]"
RUN useradd --create-home --uid 1000 mirror
USER 1000
# What the NVIDIA Container Toolkit reads where --gpus is not given.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["tini", "--", "mirror"]
CMD ["doctor"]

FROM package AS examples
COPY examples /program/examples
WORKDIR /program
