"""Settings of the gateway."""

from dataclasses import dataclass

from tidemill_mesh.config import ServiceSettings, setting


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(ServiceSettings):
    """What the gateway can be told."""

    port: int = setting(50051, minimum=0, maximum=65535)
    """gRPC port of the public API; 0: any free one."""
    http_api_port: int = setting(8000, minimum=0, maximum=65535)
    """Port of the OpenAI HTTP API; 0: any free one."""
    api_keys_file: str = ""
    """File of lines "KEY TENANT" ("sha256:HEX TENANT" hides the key); empty: no keys, every caller is "default"."""
    tenant_limits_file: str = ""
    """TOML file of tables [default] and [tenants.NAME]: concurrent_requests, requests_per_minute, tokens_per_minute,
    weight."""
    cache_secret: str = setting("", secret=True)
    """Secret behind the tenants' block-hash salts; the same on all workers."""
    asset_cache_dir: str = ""
    """Folder that keeps model cards and tokenizers by digest over restarts; empty: memory only."""
    default_timeout_s: float = setting(600.0, minimum=1.0, maximum=86400.0)
    """Deadline of a request that names none."""
    max_timeout_s: float = setting(3600.0, minimum=1.0, maximum=86400.0)
    """Longest deadline that a request may ask for."""
    default_max_tokens: int = setting(4096, minimum=1, maximum=1 << 24)
    """Bound on max_tokens of a request that names none."""
    max_prompts: int = setting(64, minimum=1, maximum=1024)
    """Most prompts in one completion request."""
    max_choices: int = setting(128, minimum=1, maximum=4096)
    """Most choices of one request: prompts x n."""
    max_body_bytes: int = setting(16 << 20, minimum=1024, maximum=1 << 30)
    """Largest HTTP request body."""
    max_inflight_body_bytes: int = setting(512 << 20, minimum=1 << 20, maximum=1 << 40)
    """Bytes of all HTTP bodies and gRPC requests that are being read or wait to be accepted; beyond it the answer is
    RESOURCE_EXHAUSTED."""
    receive_timeout_s: float = setting(60.0, minimum=0.1, maximum=3600.0)
    """Longest time for a request to arrive, from its first byte to its last; then the answer is 408, or by gRPC
    DEADLINE_EXCEEDED."""
    max_concurrent_requests: int = setting(1024, minimum=1, maximum=65536)
    """Requests that run at once."""
    max_queued_requests: int = setting(256, minimum=0, maximum=65536)
    """Requests that may wait for one of these places; beyond it the answer is RESOURCE_EXHAUSTED."""
    max_tenant_requests: int = setting(0, minimum=0, maximum=65536)
    """Requests of one tenant that run or wait at once; 0: no limit."""
    shed_load: float = setting(4.0, minimum=0.0)
    """SLO load of the least loaded instance of a kind from which requests of low classes are refused; 0: never."""
    shed_below_priority: int = setting(0, minimum=-100, maximum=101)
    """The classes that are refused then: those of a lower priority."""
    queue_wait_s: float = setting(10.0, minimum=0.0, maximum=3600.0)
    """Longest wait for a place."""
    placement_wait_s: float = setting(10.0, minimum=0.0, maximum=3600.0)
    """How long a request waits for an instance that is starting before it ends with UNAVAILABLE."""
    resume_wait_s: float = setting(60.0, minimum=0.0, maximum=3600.0)
    """The same for a request of which the client already has tokens."""
    max_attempts: int = setting(4, minimum=1, maximum=32)
    """Times that a choice is started, losses of instances included."""
    credit_window_tokens: int = setting(256, minimum=8, maximum=1 << 20)
    """Tokens that a worker may be ahead of a streaming client."""
    slow_client_s: float = setting(30.0, minimum=0.1, maximum=3600.0)
    """A client that takes nothing for so long is cut off."""
    model_linger_s: float = setting(600.0, minimum=0.0, maximum=86400.0)
    """A model whose last worker is gone stays listed (not ready) for so long."""
