"""Blocks being computed right now, so that others with the same cold prefix wait instead of repeating the work."""

from collections import deque

from tidemill_engine.request import Request


class InFlightPrefixes:
    """Block hash -> the request that computes it. An owner leaves hash by hash as its blocks are committed."""

    def __init__(self) -> None:
        self._owner: dict[bytes, Request] = {}
        self._owned: dict[Request, deque[tuple[int, bytes]]] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def owner(self, block_hash: bytes) -> Request | None:
        """Who computes this block."""
        return self._owner.get(block_hash)

    def register(self, request: Request, first_block: int, block_hashes: list[bytes]) -> None:
        """`request` is going to compute its blocks from `first_block` on; those that have an owner keep it."""
        self.remove(request)
        owned = deque((i, h) for i, h in enumerate(block_hashes, first_block) if h not in self._owner)
        self._owner.update((block_hash, request) for _, block_hash in owned)
        if owned:
            self._owned[request] = owned

    def advance(self, request: Request, num_computed_blocks: int) -> None:
        """The request's leading blocks are committed."""
        owned = self._owned.get(request)
        while owned and owned[0][0] < num_computed_blocks:
            del self._owner[owned.popleft()[1]]
        if owned is not None and not owned:
            del self._owned[request]

    def remove(self, request: Request) -> None:
        """The request computes nothing more."""
        for _, block_hash in self._owned.pop(request, ()):
            del self._owner[block_hash]
