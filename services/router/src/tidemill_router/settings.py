"""Settings of the router."""

from dataclasses import dataclass

from tidemill_mesh.config import ServiceSettings, setting


@dataclass(frozen=True, kw_only=True)
class RouterSettings(ServiceSettings):
    """What the router can be told."""

    index_max_bytes: int = setting(256 << 20, minimum=1 << 20)
    """Memory that the block index may take, in bytes; beyond it the least recently used blocks are forgotten."""
    direct_uncached_tokens: int = setting(16, minimum=0)
    """A prompt goes to a decode instance alone when it would compute at most this many tokens there; 0: never."""
    local_prefill_load: float = setting(3.0, minimum=0.0)
    """SLO load of the least loaded prefill instance from which decode instances with time to spare compute prompts
    themselves; 0: never."""
    local_prefill_tokens: int = setting(2048, minimum=1)
    """Most tokens of a prompt that a decode instance computes then."""
    reservation_s: float = setting(0.0, minimum=0.0, maximum=3600.0)
    """Seconds that a reservation stands without a report from its gateway; 0: three times liveness_s."""
    decode_high_water: float = setting(0.9, minimum=0.1, maximum=1.0)
    """Share of a decode instance's blocks that placements may fill; when all are above it, it is not looked at."""
    expected_output_tokens: int = setting(256, minimum=1)
    """Output tokens assumed of a request that allows more."""
    tie_fraction: float = setting(0.05, minimum=0.0, maximum=1.0)
    """Instances within this share of the best predicted seconds are equal; one of them is drawn."""
    work_weight: float = setting(2.0, minimum=0.0, maximum=10.0)
    """Seconds charged for what a prompt displaces from an instance's cache, for each second that it works there."""
    turnover_half_life_s: float = setting(300.0, minimum=1.0)
    """Seconds in which what an instance was given to compute counts half as pressure on its cache."""
    max_queue_s: float = setting(600.0, minimum=0.0)
    """Predicted queue seconds beyond which requests are refused with a time to retry; 0: never."""
    stale_load_s: float = setting(1.0, minimum=0.1)
    """Age of a load report, in seconds, from which it costs its instance a penalty."""
    stale_penalty_s: float = setting(2.0, minimum=0.0)
    """Most predicted seconds that a stale or missing load report adds; reached at ten times stale_load_s."""
    default_prefill_tokens_per_s: float = setting(500.0, minimum=0.1)
    """Prefill rate assumed of an instance that has not measured its own."""
    default_decode_step_s: float = setting(0.05, minimum=0.00001)
    """Seconds of a decode step assumed of an instance that has not measured its own."""
    default_transfer_bytes_per_s: float = setting(1e9, minimum=1.0)
    """Bandwidth between instances, and from kvstore, assumed until it is measured."""
    measure_half_life_s: float = setting(30.0, minimum=0.1)
    """Seconds in which half the trust in what an idle instance measured goes over to its best peer's measure."""
    measure_noise: float = setting(0.25, minimum=0.0, maximum=10.0)
    """Relative difference from its peers that an instance's measured speed must exceed to count; the excess counts."""
    l2_bytes_per_s: float = setting(10e9, minimum=1.0)
    """Bandwidth assumed from an instance's host memory to its pool."""
    fetch_latency_s: float = setting(0.02, minimum=0.0, maximum=10.0)
    """Seconds of a fetch from kvstore beside its bytes, and what is uncertain about it: blocks that are at hand win."""
    peer_fetch: bool = True
    """Whether instances fetch blocks from each other's memory, as their own setting of that name says."""
    peer_latency_s: float = setting(0.02, minimum=0.0, maximum=10.0)
    """Seconds of a fetch from another instance's memory beside its bytes, and what is uncertain about it."""
    snapshot_timeout_s: float = setting(10.0, minimum=0.1)
    """Longest time that one snapshot of a worker's block list may take; the worker counts as cold meanwhile."""
    snapshot_concurrency: int = setting(16, minimum=1, maximum=1024)
    """Snapshots fetched at the same time."""
