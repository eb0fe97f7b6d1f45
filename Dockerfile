# The service with the embedded checkpoint, for NVIDIA GPUs. Mount another checkpoint and name it
# with --checkpoint.
#
#   docker build --build-arg CUDA=cuda13 -t tandem .
#   docker run --gpus all -p 50051:50051 -v tandem:/home/tandem/.cache/tandem tandem
#
# The volume keeps compiled programs: the next start takes them from there.

FROM python:3.12-slim AS build
# cuda12 or cuda13: which CUDA libraries jax brings (the driver is the host's). Grace Blackwell
# (GB10) needs cuda13.
ARG CUDA=cuda12
RUN python -m venv /opt/tandem
WORKDIR /source
# Dependencies first: they change less often than the code.
COPY pyproject.toml README.md LICENSE ./
RUN mkdir model service \
    && touch model/__init__.py service/__init__.py \
    && /opt/tandem/bin/pip install --no-cache-dir ".[${CUDA}]"
COPY model model
COPY service service
RUN /opt/tandem/bin/pip install --no-cache-dir --no-deps --force-reinstall .

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 tandem
COPY --from=build /opt/tandem /opt/tandem
# A volume gets the owner of what it is mounted on.
RUN install --directory --owner=tandem --group=tandem /home/tandem/.cache /home/tandem/.cache/tandem
COPY tools/health_probe.py /opt/tandem/health_probe.py
ENV PATH=/opt/tandem/bin:$PATH \
    PYTHONUNBUFFERED=1
USER tandem
WORKDIR /home/tandem
EXPOSE 50051
# Not serving until warm-up is over, which for a large checkpoint takes minutes; while draining; and
# after an engine was stuck for --stall-seconds.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
  CMD ["python", "/opt/tandem/health_probe.py", "localhost:50051"]
# SIGTERM drains: running requests end, new ones are refused.
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "service", "--host", "0.0.0.0"]
