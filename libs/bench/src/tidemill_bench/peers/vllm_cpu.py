"""vLLM's CPU build as a peer: an OpenAI server in a process of its own, from a virtual environment of its own."""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    """A free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def vllm_server(venv: Path, model_dir: Path, *, dtype: str, start_timeout_s: float, log: Path) -> Iterator[int]:
    """Runs the server and yields its port. Raises RuntimeError with the log's place when it does not start."""
    port = free_port()
    argv = [str(venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(model_dir), "--served-model-name", "peer", "--max-model-len", "2048"]
    argv += ["--max-num-seqs", "16", "--dtype", dtype, "--port", str(port), "--host", "127.0.0.1"]
    argv += ["--enable-prompt-tokens-details"]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as sink:
        process = subprocess.Popen(argv, env=env, stdout=sink, stderr=sink, start_new_session=True)
    try:
        deadline = time.monotonic() + start_timeout_s
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM did not start; see {log}")
            time.sleep(1)
        yield port
    finally:
        os.killpg(process.pid, 15)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
