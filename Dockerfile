# docker build -t twostroke . && docker run --rm -p 127.0.0.1:8000:8000 twostroke
#
# pip takes torch from where it is set up to; its default build brings gigabytes of CUDA packages. For the CPU's alone,
# name an index that has it: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir -c /wheels/constraints.txt /wheels/*.whl && rm -r /wheels
RUN useradd --create-home twostroke
USER twostroke
WORKDIR /home/twostroke
EXPOSE 8000
# alive while steps are committed; the first look comes after a model has had time to load
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# in a container 127.0.0.1 is the container's own; who may reach the port is decided where it is published
ENTRYPOINT ["twostroke"]
CMD ["serve", "--host", "0.0.0.0"]
