# On a CPU. For an NVIDIA GPU: docker/Dockerfile.cuda.
#   docker build --tag alignment .
#   docker run --rm --volume "$PWD":/work alignment run quickstart
FROM python:3.12-slim

# torch without CUDA's libraries, which are several gigabytes.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=text-metrics

WORKDIR /opt/alignment
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url "$TORCH_INDEX" ".[$EXTRAS]" \
    && useradd --create-home --uid 1000 alignment && mkdir /work && chown alignment /work

# Not root. What is written to /work belongs to user 1000; --user changes that.
USER alignment
WORKDIR /work
ENTRYPOINT ["alignment"]
CMD ["--help"]
