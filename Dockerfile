# The controller's image: `./build.sh image TAG`. It holds the base and one file, which `./build.sh verify` checks.
# docs/install.md says how to pin both bases by digest. It needs no shell, no writable path and no capability.
ARG BUILD=docker.io/library/python:3.13-slim-trixie
ARG BASE=gcr.io/distroless/python3-debian13:nonroot

# the same minor version as the base has, for the bytecode
FROM ${BUILD} AS build
WORKDIR /src
COPY admission.py build.sh ./
COPY requirements requirements
ARG COMMIT=
RUN ./build.sh package

FROM ${BASE}
COPY --from=build /src/dist/dispatch-admission.pyz /app/dispatch-admission.pyz
USER 65532:65532
ENTRYPOINT ["/usr/bin/python3.13", "-I", "/app/dispatch-admission.pyz"]
