# A stage's image: Python, tinygrad, numpy and this code. `docker run IMAGE` is the local main job, `docker run IMAGE node`
# a stage. On an NVIDIA host the driver compiles the kernels and clang is dead weight: --build-arg CLANG= leaves it out.
FROM python:3.12-slim
ARG CLANG=clang
RUN if [ -n "$CLANG" ]; then apt-get update && apt-get install -y --no-install-recommends "$CLANG" \
    && rm -rf /var/lib/apt/lists/*; fi \
    && pip install --no-cache-dir tinygrad==0.12.0 numpy
COPY ppsmoke /opt/ppsmoke/ppsmoke
ENV PYTHONPATH=/opt/ppsmoke PYTHONUNBUFFERED=1 CUDA_PTX=1
ENTRYPOINT ["python", "-m", "ppsmoke"]
