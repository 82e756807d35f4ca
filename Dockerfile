# The controller's image: `./build.sh image TAG`. docs/install.md says how to pin both bases by digest.
# It needs no shell, no writable path and no capability.
ARG BUILD=docker.io/library/python:3.13-slim-trixie
ARG BASE=gcr.io/distroless/python3-debian13:nonroot

FROM ${BASE} AS base

# the same minor version as the base has, for the bytecode
FROM ${BUILD} AS build
WORKDIR /src
COPY admission.py build.sh ./
COPY requirements requirements
ARG COMMIT=
RUN ./build.sh package
# The base has no bytecode of its standard library: to compile it at each start takes 0.6 s and 5 MiB. This is its own
# library's, compared with the source when it is loaded: it can never stand in for another version.
COPY --from=base /usr/lib/python3.13 /base/usr/lib/python3.13
RUN python3 -W ignore -m compileall -q --invalidation-mode checked-hash -s /base -p / /base/usr/lib/python3.13 \
 && find /base ! -type d ! -name '*.pyc' -delete

FROM base
COPY --from=build /base/usr/lib/python3.13 /usr/lib/python3.13
COPY --from=build /src/dist/dispatch-admission.pyz /app/dispatch-admission.pyz
USER 65532:65532
ENTRYPOINT ["/usr/bin/python3.13", "-I", "/app/dispatch-admission.pyz"]
