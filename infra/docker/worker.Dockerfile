# The cloud worker. Build from the repository root:
#   docker build -f infra/docker/worker.Dockerfile -t kvtide-worker .
# CPU by default; for CUDA pass
#   --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --build-arg EXTRAS=[cuda]
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=""
# The compiler is for the codec's kernel; it stays in this stage.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python -m venv /opt/kvtide \
    && /opt/kvtide/bin/pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" \
        --constraint constraints.txt ".${EXTRAS}"

FROM ${PYTHON_IMAGE}
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/kvtide kvtide
COPY --from=build /opt/kvtide /opt/kvtide
ENV PATH=/opt/kvtide/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    KVTIDE_WORKER_HTTP_HOST=0.0.0.0 \
    KVTIDE_WORKER_HTTP_PORT=8471 \
    KVTIDE_WORKER_CACHE_DIR=/var/lib/kvtide/cache
USER 10001
# Converted weights and calibrations; mount a volume here so that a restart does not convert again.
VOLUME /var/lib/kvtide
EXPOSE 8471
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=180s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8471/healthz', timeout=2)"]
ENTRYPOINT ["kvtide-worker"]
