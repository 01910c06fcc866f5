"""Settings of a kvstore."""

from dataclasses import dataclass

from tidemill_mesh.config import ServiceSettings, setting

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class KvStoreSettings(ServiceSettings):
    """What a kvstore can be told."""

    data_dir: str = "~/.cache/tidemill/kvstore"
    """Folder of the segments; one process uses it at a time."""
    object_url: str = ""
    """Keeps blocks in an S3-compatible object store instead of data_dir: "s3://bucket/prefix", shared by all kvstores
    that name it."""
    object_endpoint: str = ""
    """URL of the object store's server; empty: the provider's own."""
    object_region: str = "us-east-1"
    """Region of the bucket."""
    object_access_key: str = setting("", secret=True)
    """Key id, as "@file" or text; empty: from the environment, as the provider's own tools take it."""
    object_secret_key: str = setting("", secret=True)
    """Secret of the key, as "@file" or text."""
    object_list_s: float = setting(60.0, minimum=0.1)
    """Time between two looks for blocks that other kvstores have stored."""
    object_timeout_s: float = setting(10.0, minimum=0.1)
    """Longest time of one request to the object store."""
    capacity_bytes: int = setting(4 << 30, minimum=4 * MIB)
    """Most bytes on disk or in the object store; the oldest ones that nobody reads are deleted to stay within."""
    segment_bytes: int = setting(64 * MIB, minimum=MIB)
    """Size of a segment file, the unit of eviction (at most a quarter of the capacity); a larger block is refused."""
    fsync: str = setting("none", choices=("none", "segment", "put"))
    """When data is forced to the disk: never, at the end of each segment, or before each put is answered. A killed
    process loses nothing in any case; a loss of power costs what was not forced, as misses."""
    transport: str = setting("ucx", choices=("ucx", "tcp"))
    """How bytes travel; tcp is slower and taken only when chosen here."""
    inflight_bytes: int = setting(256 * MIB, minimum=MIB)
    """Most memory of puts and gets, half for each; further ones wait within their deadline."""
    max_message_bytes: int = setting(64 * MIB, minimum=MIB)
    """Largest put or get; a larger put is refused, a get is cut to whole blocks (at most half of inflight_bytes)."""
    max_waiting: int = setting(256, minimum=0)
    """Puts and gets that may wait for memory; further ones are refused."""
    max_deadline_s: float = setting(60.0, minimum=0.1)
    """Longest time that a put or get may take, whatever its caller allows."""
    read_threads: int = setting(4, minimum=1, maximum=64)
    """Reads at once; one more thread writes."""
    max_queued_reads: int = setting(16, minimum=0)
    """Gets that may wait for a thread that reads; further ones are refused at once, so that callers compute instead."""
    tenant_quota_bytes: int = setting(0, minimum=0)
    """Most bytes of blocks of one tenant; its oldest blocks that nobody reads make room; 0: no limit."""
    tenant_quotas: tuple[str, ...] = ()
    """Quotas that differ, as "tenant=bytes", comma separated."""
