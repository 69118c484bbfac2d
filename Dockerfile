# vitrail as a service, on a CPU:
#
#     docker build -t vitrail .
#     docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/runs/demo:/model:ro" -e VITRAIL_API_KEY=... vitrail
#
# The first stage installs, the second has only what runs.
FROM python:3.12-slim AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/vitrail
WORKDIR /src
COPY constraints.txt ./
# PyTorch for CPUs, a tenth of the size of the one for GPUs. The largest layer, so it comes first.
RUN version=$(sed -n 's/^torch==//p' constraints.txt) \
    && /opt/vitrail/bin/pip install "torch==$version" --index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md LICENSE ./
COPY vitrail ./vitrail
RUN /opt/vitrail/bin/pip install --constraint constraints.txt ".[serve,export,fast]"

FROM python:3.12-slim

LABEL org.opencontainers.image.title="vitrail" \
      org.opencontainers.image.description="Vision Transformers over HTTP" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin vitrail
COPY --from=build /opt/vitrail /opt/vitrail

# The file system may be read-only: only the choice of the fastest engine is cached, in /tmp.
ENV PATH="/opt/vitrail/bin:$PATH" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    VITRAIL_CACHE=/tmp/vitrail MPLCONFIGDIR=/tmp/matplotlib
USER 10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vitrail", "serve"]
CMD ["/model", "--host", "0.0.0.0"]
