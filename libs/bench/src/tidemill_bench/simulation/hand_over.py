"""From the engine that computed a prompt to the one that decodes it: KV follows behind the chunks that compute it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """An engine's own link to the others."""

    bytes_per_s: float = 50e9
    latency_s: float = 0.002


class Link:
    """What leaves one engine, one transfer after the other."""

    def __init__(self, shape: HandOver, chunk_bytes: float) -> None:
        """`chunk_bytes` of KV come into being with the last step, so that they cannot have gone before."""
        self._shape = shape
        self._chunk_bytes = chunk_bytes
        self._free_s = 0.0

    def send_s(self, size_bytes: float, now_s: float) -> float:
        """Seconds until a prompt whose first token is out has left.

        What came before its last chunk went while that was computed, if nothing else had to; the link was busy with it.
        """
        left_s = min(size_bytes, self._chunk_bytes) / self._shape.bytes_per_s
        earlier_s = size_bytes / self._shape.bytes_per_s - left_s
        self._free_s = max(now_s, self._free_s + earlier_s) + left_s
        return self._shape.latency_s + self._free_s - now_s
