"""`tidemill models FOLDER...` tells what folders hold without a cluster, and why one cannot be served."""

import json
import subprocess
import sys
from pathlib import Path

from tidemill_local.model_folders import read_summaries, rows
from tidemill_local.models import run_loader


def test_a_served_and_a_refused_folder_have_their_lines(tmp_path: Path) -> None:
    run_loader("tiny", "--architecture", "qwen3", "--out", str(tmp_path / "good"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text(json.dumps({"architectures": ["NobodyForCausalLM"]}))
    command = [sys.executable, "-m", "tidemill_local", "models", str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert told.returncode == 1
    header, bad, good = told.stdout.splitlines()
    assert header.split() == ["MODEL", "ARCHITECTURE", "WEIGHTS", "STORED", "AS", "CONTEXT", "KV/TOKEN",
                              "KV/SEQUENCE", "BLOCKS", "OF", "ON", "CPU"]  # fmt: skip
    assert "no: architecture NobodyForCausalLM is not supported" in bad
    assert good.split()[1:] == ["Qwen3ForCausalLM", "0", "MiB", "F32", "1024", "256", "B", "0", "B", "1", "yes"]


def test_fields_that_a_newer_engine_adds_are_passed_over() -> None:
    told = {
        "folder": "a",
        "architecture": "",
        "weight_bytes": 1 << 20,
        "dtypes": "",
        "context_tokens": 0,
        "kv_bytes_per_token": 0,
        "kv_bytes_per_sequence": 0,
        "block_multiple": 1,
        "reason": "config.json is missing",
        "later": 3,
    }
    [_, line] = rows(read_summaries(json.dumps([told])))
    assert line == ("a", "-", "1 MiB", "-", "0", "0 B", "0 B", "1", "no: config.json is missing")
