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
    reservation_s: float = setting(0.0, minimum=0.0, maximum=3600.0)
    """Seconds that a reservation stands without a report from its gateway; 0: three times liveness_s."""
    decode_high_water: float = setting(0.9, minimum=0.1, maximum=1.0)
    """Share of a decode instance's blocks that placements may fill; when all are above it, it is not looked at."""
    expected_output_tokens: int = setting(256, minimum=1)
    """Output tokens assumed of a request that allows more."""
    tie_fraction: float = setting(0.05, minimum=0.0, maximum=1.0)
    """Instances within this share of the best predicted seconds are equal; one of them is drawn."""
    work_weight: float = setting(1.0, minimum=0.0, maximum=10.0)
    """Extra weight of the seconds an instance would compute, so that it does not repeat what another is computing."""
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
    l2_bytes_per_s: float = setting(10e9, minimum=1.0)
    """Bandwidth assumed from an instance's host memory to its pool."""
    snapshot_timeout_s: float = setting(10.0, minimum=0.1)
    """Longest time that one snapshot of a worker's block list may take; the worker counts as cold meanwhile."""
    snapshot_concurrency: int = setting(16, minimum=1, maximum=1024)
    """Snapshots fetched at the same time."""
