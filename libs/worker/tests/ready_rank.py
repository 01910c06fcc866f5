"""What a rank of a very small model says when it is ready."""

from tidemill_engine import messages
from tidemill_engine.kv_groups import KVGroupSpec

RANK = messages.RankReady(
    rank=0,
    transfer_address="here",
    head_start=0,
    head_end=1,
    num_blocks=8,
    num_snapshots=0,
    kv_dtype="float32",
    kv_groups=[
        KVGroupSpec(name="kv", kind="paged", layers=(0,), dtype="float32", num_heads=1, head_values=2),
    ],
    kv_format="v1/16/kv",
    kv_bytes_per_token=16,
    load_seconds=0.0,
    backend="cpu",
)
