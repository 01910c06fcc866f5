"""What a prefill or decode instance can be told."""

from dataclasses import dataclass
from pathlib import Path

from tidemill_mesh.config import ServiceSettings, setting


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ServiceSettings):
    """Settings of both worker services; they differ in defaults only."""

    model: str = ""
    """Hugging Face safetensors folder of the model to serve."""
    model_name: str = ""
    """Public name of the model; empty: the folder's name."""
    aliases: tuple[str, ...] = ()
    """Further names of the model, comma separated."""
    device: str = "cpu"
    """Torch device of the ranks; "cuda" gives each rank its own GPU."""
    weights: str = setting("auto", choices=("auto", "fp32", "bf16", "q4_1"))
    """Form of the weights in memory."""
    kv_dtype: str = setting("float32", choices=("float32", "bfloat16"))
    """Type of paged KV in the pool; peers may use another one."""
    block_size: int = setting(32, minimum=1, maximum=1024)
    """Tokens of a KV block; equal on all workers of a model."""
    num_blocks: int = setting(0, minimum=0)
    """Blocks of each rank's pool; 0: as many as kv_memory_bytes holds."""
    kv_memory_bytes: int = setting(1 << 30, minimum=1)
    """Bytes of each rank's pool."""
    num_snapshots: int = setting(256, minimum=0)
    """Kept snapshots of sequence state, for models that have some."""
    max_num_seqs: int = setting(32, minimum=1, maximum=4096)
    """Requests in one step."""
    max_num_batched_tokens: int = setting(512, minimum=1)
    """Token budget of one step; also the longest chunk of a prompt."""
    max_context_tokens: int = setting(0, minimum=0)
    """Longest prompt + output; 0: the model's."""
    torch_threads: int = setting(0, minimum=0)
    """Threads of torch's CPU kernels in each rank; 0: torch's own choice."""
    seed: int = 0
    """Seeds the rank processes; requests bring their own seeds."""
    tp_size: int = setting(1, minimum=1, maximum=64)
    """Ranks that share the heads of one cache domain."""
    dp_size: int = setting(1, minimum=1, maximum=64)
    """Cache domains of this instance, each with its own copy of the model."""
    transport: str = setting("ucx", choices=("ucx", "tcp"))
    """How KV moves between ranks; "tcp" is slower and needs no UCX."""
    cache_secret: str = setting("", secret=True)
    """Deployment secret of the tenants' cache salts, as "@file" or text; equal on gateways and workers."""

    start_timeout_s: float = setting(600.0, minimum=1.0)
    """Longest time from a rank's start to its readiness."""
    rank_watchdog_s: float = setting(60.0, minimum=2.0)
    """A leader that reports nothing for so long, idle ticks included, is taken for frozen and restarted."""
    restart_limit: int = setting(5, minimum=0)
    """Failures of a cache domain within restart_window_s after which it stays down."""
    restart_window_s: float = setting(600.0, minimum=1.0)
    """Window of restart_limit."""
    restart_backoff_s: float = setting(0.5, minimum=0.01)
    """Wait before the first restart; doubles with each failure in the window, up to 30 s."""
    rank_log_dir: str = ""
    """Folder of one log file for each rank; empty: the service's stderr."""

    hold_s: float = setting(30.0, minimum=1.0)
    """Longest time that finished KV waits for a decode worker to fetch it; also the life of a ticket."""
    transfer_timeout_s: float = setting(20.0, minimum=0.5)
    """Longest time of one KV message between ranks, from its announcement."""
    transfer_bytes_per_s: float = setting(5e8, minimum=1.0)
    """Bandwidth that hand-over is planned with until one has been measured."""
    slab_bytes: int = setting(4 << 20, minimum=1)
    """Aimed size of one KV message; at least one block."""
    slabs_in_flight: int = setting(3, minimum=1, maximum=64)
    """KV messages of one hand-over under way at a time."""
    credit_stall_s: float = setting(30.0, minimum=0.1)
    """A request that gets no credit from its gateway for so long is aborted."""
    outbox_messages: int = setting(4096, minimum=16)
    """Unsent messages after which a gateway that does not read is cut off."""

    l3_policy: str = setting("write_through", choices=("write_through", "off"))
    """Whether full blocks go to kvstore as they are computed, and missing ones are looked for there."""
    l3_offloads_in_flight: int = setting(2, minimum=1, maximum=64)
    """Offloads of a cache domain under way at a time."""
    l3_queue_blocks: int = setting(1024, minimum=1)
    """Blocks that may wait to be offloaded; more are dropped and counted."""
    l3_batch_blocks: int = setting(32, minimum=1)
    """Blocks of one offload."""
    l3_timeout_s: float = setting(10.0, minimum=0.1)
    """Longest time of one offload."""
    onboard_min_blocks: int = setting(2, minimum=1)
    """Fewest missing full blocks that are worth asking kvstore for."""
    onboard_deadline_s: float = setting(2.0, minimum=0.05)
    """Longest time that a request waits for blocks from kvstore before it computes them."""

    load_interval_s: float = setting(0.25, minimum=0.05, maximum=10.0)
    """Time between load reports."""
    slo_ttft_s: float = setting(1.0, minimum=0.001)
    """Target of the time to first token that prefill's SLO load is measured against."""
    slo_tpot_s: float = setting(0.1, minimum=0.0001)
    """Target of the time per output token that decode's SLO load is measured against."""

    @property
    def public_name(self) -> str:
        """Name under which the model is served."""
        return self.model_name or Path(self.model).resolve().name
