"""How the clients reach a gateway: channel options and the caller's key."""

# Prompts of a million token ids fit; the gateway has the same limit.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# A gateway that freezes is noticed after about 20 s also while a stream is quiet.
KEEPALIVE_MS = 10_000

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.max_pings_without_data", 0),
]
# The gateway ends a request at its deadline and says why; the client's own limit is only for a gateway that cannot.
DEADLINE_SLACK_S = 5.0

Metadata = tuple[tuple[str, str], ...]


def key_metadata(api_key: str | None) -> Metadata:
    """The metadata that carries a key."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def call_timeout(timeout_s: float) -> float | None:
    """The client's own limit for a request that has a deadline."""
    return timeout_s + DEADLINE_SLACK_S if timeout_s > 0 else None
