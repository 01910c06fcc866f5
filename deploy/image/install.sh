#!/bin/sh
# Inside an image build: install.sh CONSTRAINTS DISTRIBUTION[EXTRA]... into /opt/tidemill.
# A CA file mounted as build secret "ca" is trusted; wheels in deploy/wheels are preferred to those of an index.
set -eu
constraints=$1
shift
if [ -f /run/secrets/ca ]; then
    export PIP_CERT=/run/secrets/ca SSL_CERT_FILE=/run/secrets/ca
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_LINK_MODE=copy
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python=/opt/tidemill/bin/python
[ -x "$python" ] || python3 -m venv /opt/tidemill
[ -x /opt/build/bin/uv ] || { python3 -m venv /opt/build && /opt/build/bin/pip install -q -c "$constraints" uv grpcio-tools mypy-protobuf; }
[ -f libs/client/src/tidemill/v1/__init__.py ] || PATH=/opt/build/bin:$PATH /opt/build/bin/python proto/generate.py
case " $* " in
*"[torch]"*)
    # pip, because it alone takes a build of torch with a local version from deploy/wheels.
    "$python" -m pip install -q -c "$constraints" --find-links deploy/wheels \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$(grep '^torch==' "$constraints")"
    ;;
esac
# shellcheck disable=SC2046
/opt/build/bin/uv pip install -q --python "$python" -c "$constraints" $(/opt/build/bin/python deploy/image/closure.py "$@")
