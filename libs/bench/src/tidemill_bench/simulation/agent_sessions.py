"""Coding-agent sessions of kv-cache-tester in their compact form, as one merged trace."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidemill_bench.simulation.trace import TraceRequest

RECORDED_BLOCK = 64
SESSION_BITS = 20
"""Ids are local to a session and smaller than 2 to this power."""


def read_agent_sessions(
    path: Path, block_size: int, *, sessions: int, every_s: float, seconds: float, most_tokens: int = 200_000
) -> list[TraceRequest]:
    """Main agents' requests of the first distinct sessions, one session starting each `every_s`, within `seconds`.

    Sessions with a prompt beyond `most_tokens` are left out. `block_size` is a multiple of the recorded block.
    """
    stride = block_size // RECORDED_BLOCK
    merged = []
    for number, requests in zip(range(sessions), _distinct(path, most_tokens), strict=False):
        ids: list[int] = []
        for request in requests:
            share, *runs = request["h"]
            ids = ids[:share] + [i for start, length in runs for i in range(start, start + length)]
            # An id names its block and all before it, so that of a longer block is the one of its last part.
            blocks = [number << SESSION_BITS | i for i in ids[stride - 1 :: stride]]
            tokens = min(request["in"], len(ids) * RECORDED_BLOCK)
            if len(blocks) * block_size < tokens:
                blocks.append(number << SESSION_BITS | ids[-1])
            merged.append((number * every_s + request["t"], number, tokens, request["out"], blocks))
    merged.sort(key=lambda item: item[:2])
    return [
        TraceRequest(index, when, tokens, max(1, out), blocks, session)
        for index, (when, session, tokens, out, blocks) in enumerate(m for m in merged if m[0] <= seconds)
        if tokens > 0
    ]


def _distinct(path: Path, most_tokens: int) -> Iterator[list[dict[str, Any]]]:
    seen = set()
    with path.open() as lines:
        for line in lines:
            recorded = json.loads(line)["requests"]
            key = json.dumps(recorded)
            requests = [r for r in recorded if r.get("type") != "subagent"]
            if key not in seen and max(r["in"] for r in requests) <= most_tokens:
                yield requests
            seen.add(key)
