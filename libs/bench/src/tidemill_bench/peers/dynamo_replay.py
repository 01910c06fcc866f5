"""Dynamo's own offline replay of a trace, run by the peers' Python: `dynamo_replay.py TRACE MODE SPEED`.

Prints its summary as JSON. The engine is Dynamo's mocker with its polynomial step times.
"""

import importlib
import json
import sys
from typing import Any


def main() -> None:
    """Replays argv[1] (a Mooncake trace) in mode argv[2] (round_robin, kv) at argv[3] times the recorded rate."""
    trace, mode, speed = sys.argv[1], sys.argv[2], float(sys.argv[3])
    core: Any = importlib.import_module("dynamo._core")
    llm: Any = importlib.import_module("dynamo.llm")
    engine = {
        "backend": "vllm",
        "block_size": 512,
        "num_gpu_blocks": 4096,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
    }
    router: dict[str, Any] = {"router_mode": "round_robin"}
    if mode == "kv":
        router = {"router_mode": "kv_router", "router_config": llm.KvRouterConfig()}
    report = core.run_mocker_trace_replay(
        [trace],
        num_workers=8,
        trace_block_size=512,
        arrival_speedup_ratio=speed,
        extra_engine_args={"engine": engine, "dp_size": 1},
        sla_ttft_ms=2000.0,
        sla_itl_ms=50.0,
        **router,
    )
    print(json.dumps(report.summary))


if __name__ == "__main__":
    main()
