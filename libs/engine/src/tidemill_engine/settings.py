"""Settings of one rank process, made by its worker service and handed over as JSON (torch-free)."""

from typing import Literal

import msgspec


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank needs to load its part of a model and to schedule it; equal on all ranks of a domain but `rank`."""

    model_dir: str
    """Hugging Face safetensors folder."""
    device: str = "cpu"
    """Torch's name of the device."""
    weights: Literal["auto", "fp32", "bf16", "q4_1", "fp8", "fp8_block", "int8"] = "auto"
    """Form of the weights in memory; "auto" leaves it to the loader. fp32 and q4_1 run on CPUs; fp8 (a scale for each
    output), fp8_block (for each 128 x 128 values) and int8 (weights only) on CUDA."""
    kv_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"] = "float32"
    """Type of paged KV in the pool; float8_e4m3fn on CUDA only, float32 on CPUs only."""
    index_dtype: Literal["auto", "float8_e4m3fn"] = "auto"
    """CUDA, DeepSeek-V3.2 and GLM-5.2: float8_e4m3fn scores rows by FP8 copies of the indexers' keys, which are read in
    less time; the keys, and what transfers carry, stay as kv_dtype says. "auto": by the keys."""
    batch_invariant: bool = False
    """CUDA: kernels whose results for a request do not depend on what else a step holds; slower."""
    block_size: int = 32
    """Tokens of a block."""
    num_blocks: int = 0
    """Blocks of the pool; 0: as many as kv_memory_bytes holds."""
    kv_memory_bytes: int = 1 << 30
    """Bytes of the paged pool of this rank."""
    num_snapshots: int = 256
    """Kept snapshots of sequence state, for models that have some."""
    max_num_seqs: int = 32
    """Requests in one step; also the rows and sequence slots of the runner."""
    max_num_batched_tokens: int = 512
    """Token budget of one step."""
    max_context_tokens: int = 0
    """Longest prompt + output; 0: the model's."""
    torch_threads: int = 0
    """Threads of torch's CPU kernels; 0: torch's own choice."""
    seed: int = 0
    """Seeds the process; requests bring their own seeds."""

    tp_size: int = 1
    """Ranks that share the domain's heads."""
    rank: int = 0
    """Rank inside the domain, 0 is the leader."""
    domain: int = 0
    """Cache domain inside the instance."""
    tp_init_method: str = ""
    """torch.distributed address of the domain's group, for example "tcp://127.0.0.1:4711"; not needed for tp_size 1."""
    step_socket: str = ""
    """Unix socket path on which the leader hands steps to its followers; not needed for tp_size 1."""
    transport: Literal["ucx", "tcp"] = "ucx"
    """Transport of KV between workers."""
    host: str = "127.0.0.1"
    """Address that peers reach this rank's transfer agent on."""

    max_waiting_requests: int = 1024
    """Requests waiting for their first row; more are refused with RESOURCE_EXHAUSTED."""
    prefill_policy: Literal["fair", "quota", "shortest", "fcfs"] = "fair"
    """Order in which prompts are computed, see scheduler/prefill_order.py."""
    fair_stretch: float = 3.0
    """Policy "fair": for how many times its own predicted seconds a prompt lets later ones pass."""
    fair_slack_s: float = 60.0
    """Policy "fair": the longest time for which any prompt lets later ones pass."""
    quota_chunks: int = 2
    """Policy "quota": chunks that a long prompt computes before it first steps back."""
    max_partial_prefills: int = 4
    """Prompts that may be computed in part at the same time."""
    partial_kv_share: float = 0.75
    """Share of the pool that several prompts computed in part may hold together, so that short ones find room."""
    tenant_burst_s: float = 1.0
    """Engine seconds that one tenant may have had more than another that waits before it steps back."""
    max_overtakes: int = 16
    """How often smaller requests may pass one that does not fit yet."""
    priority_aging_s: float = 5.0
    """Waiting time that is worth one step of priority."""
    prefill_every_steps: int = 4
    """At least each so many steps carry prefill tokens when a prompt waits, however full of decodes they are."""
    max_preemptions: int = 3
    """How often one request may be preempted; after that it keeps its blocks."""
    growth_wait_s: float = 0.5
    """Longest time for which a request that grows waits for blocks that transfers are about to give back, before
    somebody is preempted; 0: it does not wait."""
    admission_headroom_tokens: int = 64
    """Output tokens that must fit beside the prompt at admission, fewer when max_tokens is less."""
    kv_high_water: float = 0.95
    """Share of the pool in use from which others should send elsewhere and runaways give way, and which expected growth
    must not pass; above 1: never."""
    forecast_growth: bool = False
    """Admit by the output lengths that past requests lead one to expect, not only by the headroom."""
    most_tpot_load: float = 0.0
    """Admit no more once the predicted time per output token passes so many times the tightest target; 0: no limit."""
    small_chunk_load: float = 0.0
    """Prompts get smaller chunks while the time per output token is so many times the tightest target; 0: never."""
    runaway_wait_s: float = 30.0
    """Longest time for which a runaway that gave its blocks back waits for all others."""
    move_wait_s: float = 0.0
    """Longest time for which a runaway keeps its blocks while the service seeks another instance; 0: it does not."""
    credit_stall_s: float = 30.0
    """Longest time that a request may wait for credit before it is aborted."""
    dedupe_wait_s: float = 30.0
    """Longest time that a request waits for another one that computes its prefix."""
    onboard_enabled: bool = False
    """Ask the service for blocks from L3 before computing a prompt."""
    onboard_min_blocks: int = 2
    """Fewest missing full blocks that are worth asking for."""
    onboard_deadline_s: float = 2.0
    """Longest time that a request waits for blocks from L3."""
    l2_memory_bytes: int = 0
    """Host memory of this rank for blocks that leave the pool (L2); 0: none."""
    report_hits: bool = False
    """Tell the service which blocks requests find in L1."""
    cooling_blocks: int = 0
    """Tell the service of blocks before they are evicted, so many (with free ones) ahead; 0: never."""
    transfer_limit_s: float = 30.0
    """Longest time of one transfer; so long blocks stay out of reach when their request ends in mid-transfer."""
    watchdog_s: float = 60.0
    """A follower that hears nothing from its leader, idle heartbeats included, for so long ends itself."""
    idle_tick_s: float = 1.0
    """Longest time between two step reports."""


def decode_settings(text: str | bytes) -> EngineSettings:
    """Reads settings from JSON; raises msgspec.ValidationError or ValueError naming the field."""
    settings = msgspec.json.decode(text, type=EngineSettings)
    check_settings(settings)
    return settings


def encode_settings(settings: EngineSettings) -> str:
    """JSON form for the command line of a rank."""
    return msgspec.json.encode(settings).decode()


_AT_LEAST: dict[str, float] = {
    "block_size": 1,
    "num_blocks": 0,
    "num_snapshots": 0,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_context_tokens": 0,
    "torch_threads": 0,
    "tp_size": 1,
    "rank": 0,
    "domain": 0,
    "max_waiting_requests": 1,
    "fair_stretch": 0,
    "fair_slack_s": 0,
    "quota_chunks": 1,
    "max_partial_prefills": 1,
    "partial_kv_share": 0,
    "tenant_burst_s": 0,
    "max_overtakes": 0,
    "prefill_every_steps": 1,
    "max_preemptions": 0,
    "growth_wait_s": 0,
    "admission_headroom_tokens": 1,
    "kv_high_water": 0.1,
    "most_tpot_load": 0,
    "small_chunk_load": 0,
    "runaway_wait_s": 0,
    "move_wait_s": 0,
    "onboard_min_blocks": 1,
    "priority_aging_s": 0.001,
    "credit_stall_s": 0.001,
    "dedupe_wait_s": 0,
    "onboard_deadline_s": 0.001,
    "l2_memory_bytes": 0,
    "cooling_blocks": 0,
    "transfer_limit_s": 0.001,
    "watchdog_s": 1,
    "idle_tick_s": 0.001,
}


def check_settings(settings: EngineSettings) -> None:
    """Raises ValueError naming the first field outside its range."""
    for name, minimum in _AT_LEAST.items():
        value = getattr(settings, name)
        if not value >= minimum:
            raise ValueError(f"{name} = {value} is below its minimum {minimum:g}")
    if settings.rank >= settings.tp_size:
        raise ValueError(f"rank = {settings.rank} is not below tp_size = {settings.tp_size}")
    if settings.num_blocks == 0 and settings.kv_memory_bytes <= 0:
        raise ValueError(f"kv_memory_bytes = {settings.kv_memory_bytes} leaves no room for blocks")
    tokens, seqs = settings.max_num_batched_tokens, settings.max_num_seqs
    if tokens < seqs:
        raise ValueError(f"max_num_batched_tokens = {tokens} is below max_num_seqs = {seqs}")
    if settings.tp_size > 1 and not (settings.tp_init_method and settings.step_socket):
        raise ValueError("tp_size > 1 needs tp_init_method and step_socket")
