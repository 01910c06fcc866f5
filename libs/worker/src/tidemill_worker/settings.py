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
    weights: str = setting("auto", choices=("auto", "fp32", "bf16", "q4_1", "fp8", "fp8_block", "int8"))
    """Form of the weights in memory; fp32 and q4_1 run on CPUs, fp8, fp8_block and int8 on CUDA."""
    kv_dtype: str = setting("float32", choices=("float32", "bfloat16", "float8_e4m3fn"))
    """Type of paged KV in the pool; peers may use another one. float32 is for CPUs, float8_e4m3fn for CUDA."""
    index_dtype: str = setting("auto", choices=("auto", "float8_e4m3fn"))
    """CUDA, DeepSeek-V3.2 and GLM-5.2: float8_e4m3fn scores rows by FP8 copies of the indexers' keys, which takes less
    time at long contexts and chooses a few other rows; what transfers carry stays the same."""
    batch_invariant: bool = False
    """CUDA: a request's output does not depend on what else is computed with it; slower."""
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
    quarantine_hits: int = setting(3, minimum=1)
    """Damaged transfers from one instance within quarantine_window_s after which routers place nothing on that pair."""
    quarantine_window_s: float = setting(600.0, minimum=1.0)
    """Window of quarantine_hits; also how long after a quarantine one more damaged transfer begins the next."""
    quarantine_s: float = setting(300.0, minimum=1.0)
    """Length of a quarantine."""
    silent_misses: int = setting(2, minimum=1)
    """Transfers in a row that do not arrive from one rank's domain after which routers place nothing on that pair."""
    silent_s: float = setting(60.0, minimum=1.0)
    """How long that lasts until one transfer is tried, which ends it or begins it anew."""
    slab_bytes: int = setting(4 << 20, minimum=1)
    """Aimed size of one KV message; at least one block."""
    slabs_in_flight: int = setting(3, minimum=1, maximum=64)
    """KV messages of one hand-over under way at a time."""
    credit_stall_s: float = setting(30.0, minimum=0.1)
    """A request that gets no credit from its gateway for so long is aborted."""
    outbox_messages: int = setting(4096, minimum=16)
    """Unsent messages after which a gateway that does not read is cut off."""

    l2_memory_bytes: int = setting(0, minimum=0)
    """Host memory of each rank for KV blocks that leave its pool (L2); 0: no L2."""
    l2_policy: str = setting("on_eviction", choices=("write_through", "after_hits", "on_eviction", "off"))
    """When full blocks are copied to L2: as they are computed, after write_down_hits hits, or before L1 evicts them."""
    l3_policy: str = setting("write_through", choices=("write_through", "after_hits", "on_eviction", "off"))
    """When full blocks go to kvstore (on eviction: by L2 where there is one, otherwise by L1); "off" also means that
    missing ones are not looked for there."""
    write_down_hits: int = setting(2, minimum=1)
    """Hits of policy "after_hits"."""
    cooling_blocks: int = setting(128, minimum=1)
    """Policy "on_eviction": so many blocks, free ones included, are copied ahead of their eviction."""
    peer_fetch: bool = True
    """Whether blocks are fetched from the memory of other instances that a placement names."""
    l3_offloads_in_flight: int = setting(2, minimum=1, maximum=64)
    """Offloads of a cache domain under way at a time."""
    l3_queue_blocks: int = setting(1024, minimum=1)
    """Blocks that may wait to be offloaded; more are dropped and counted."""
    l3_batch_blocks: int = setting(32, minimum=1)
    """Blocks of one offload."""
    l3_timeout_s: float = setting(10.0, minimum=0.1)
    """Longest time of one offload."""
    one_way_tier_blocks: int = setting(1024, minimum=1)
    """An alarm is raised when L2 or L3 has taken so many blocks and then, for one_way_tier_s, was asked for as many and
    gave none."""
    one_way_tier_s: float = setting(3600.0, minimum=0.1)
    """Window of one_way_tier_blocks."""
    onboard_min_blocks: int = setting(2, minimum=1)
    """Fewest missing full blocks that are worth asking the lower tiers for."""
    onboard_deadline_s: float = setting(2.0, minimum=0.05)
    """Longest time that a request waits for blocks from lower tiers before it computes them."""
    onboard_choice: str = setting("predicted", choices=("predicted", "always"))
    """Whether blocks are loaded where that is predicted to be quicker than computing them, or always."""

    prefill_policy: str = setting("fair", choices=("fair", "quota", "shortest", "fcfs"))
    """Order in which prompts are computed: fair (by arrival and predicted work, each wait bounded), quota (long prompts
    take turns), shortest (least work first, long ones may starve), fcfs."""
    fair_stretch: float = setting(3.0, minimum=0.0)
    """Policy fair: for how many times its own predicted seconds a prompt lets later ones pass; 0 is fcfs."""
    fair_slack_s: float = setting(60.0, minimum=0.0)
    """Policy fair: the longest time for which any prompt lets later ones pass."""
    tenant_burst_s: float = setting(1.0, minimum=0.0)
    """Engine seconds that one tenant may have had more than another that waits before it steps back."""
    kv_high_water: float = setting(0.95, minimum=0.1)
    """Share of the pool in use from which routers send elsewhere and runaways give way; above 1: never."""
    forecast_growth: bool = False
    """Admit only requests whose expected growth, with everybody else's, stays below kv_high_water."""
    most_tpot_load: float = setting(0.0, minimum=0.0)
    """Admit no more once the predicted time per output token passes so many times the target; 0: no limit."""

    growth_wait_s: float = setting(0.5, minimum=0.0, maximum=60.0)
    """Longest time for which a request that grows waits for blocks that transfers are about to give back, before
    somebody is preempted; never longer than computing the victim anew is predicted to take. 0: it does not wait."""
    small_chunk_load: float = setting(2.0, minimum=0.0)
    """Prompts get smaller chunks while the time per output token is so many times its target; 0: never."""
    move_wait_s: float = setting(1.0, minimum=0.0)
    """Longest time for which another instance with room is sought for an output that must give way; 0: never."""

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
