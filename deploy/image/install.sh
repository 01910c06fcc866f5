#!/bin/sh
# Steps of an image build, each its own layer so that a change of sources installs no torch again:
#   install.sh CONSTRAINTS tools                     uv and the stub compiler into /opt/build, an empty /opt/tidemill
#   install.sh CONSTRAINTS stubs                     the Python stubs of /src/proto
#   install.sh CONSTRAINTS torch                     torch, a wheel of /src/deploy/wheels preferred to an index's
#   install.sh CONSTRAINTS nvcc                      the CUDA compiler, as /opt/tidemill/cuda
#   install.sh CONSTRAINTS packages DISTRIBUTION...  distributions of /src and what they need
# A CA file mounted as build secret "ca" is trusted.
set -eu
cd /src
constraints=$1
step=$2
shift 2
if [ -s /run/secrets/ca ]; then
    export PIP_CERT=/run/secrets/ca SSL_CERT_FILE=/run/secrets/ca
fi
# Images are read-only at run time: bytecode is made now or never.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
case $step in
tools)
    # What runs needs no installer: the one in /opt/build serves both.
    python3 -m venv --without-pip /opt/tidemill
    python3 -m venv /opt/build
    /opt/build/bin/pip install -q -c "$constraints" uv grpcio-tools mypy-protobuf
    ;;
stubs)
    PATH=/opt/build/bin:$PATH python proto/generate.py
    ;;
torch)
    # pip, because it alone prefers a wheel of a local version ("+cpu") to the index's of the same release.
    /opt/build/bin/pip --python /opt/tidemill/bin/python install -q -c "$constraints" --find-links deploy/wheels \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$(grep '^torch==' "$constraints")"
    ;;
nvcc)
    # FlashInfer compiles its kernels at first use. The wheels hold a toolkit without the names that a linker looks for, and
    # the driver's library comes into the container only at run time: a stub of its name stands in.
    /opt/build/bin/uv pip install -q --python /opt/tidemill/bin/python -c "$constraints" "cuda-toolkit[nvcc,cccl]"
    home=$(echo /opt/tidemill/lib/python3*/site-packages/nvidia/cu13)
    mkdir -p "$home/lib/stubs"
    ln -sfn lib "$home/lib64"
    for library in "$home"/lib/lib*.so.*; do
        name=${library##*/}
        [ -e "$home/lib/${name%%.so.*}.so" ] || ln -s "$name" "$home/lib/${name%%.so.*}.so"
    done
    : | gcc -shared -x c - -Wl,-soname,libcuda.so.1 -o "$home/lib/stubs/libcuda.so"
    ln -sfn "$home" /opt/tidemill/cuda
    ;;
packages)
    folders=$(/opt/build/bin/python deploy/image/closure.py "$@")
    # shellcheck disable=SC2086
    /opt/build/bin/uv pip install -q --python /opt/tidemill/bin/python -c "$constraints" $folders
    # Two thirds of UCX's package are static libraries.
    find /opt/tidemill -name '*.a' -delete
    ;;
*)
    echo "no such step: $step" >&2
    exit 2
    ;;
esac
