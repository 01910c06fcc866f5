"""When a block of L1 is copied to the tier below: at once, after some hits, or before it is evicted. Pure."""

from collections.abc import Sequence

from tidemill_worker.residents import Residents, StoredBlock

POLICIES = ("write_through", "after_hits", "on_eviction", "off")


class WriteDown:
    """The policy of one tier for one domain: of what happens to blocks, those that are to be copied now."""

    def __init__(self, policy: str, after_hits: int, residents: Residents) -> None:
        assert policy in POLICIES, f"{policy!r} is no policy"
        self._policy = policy
        self._after_hits = after_hits
        self._residents = residents

    def stored(self, blocks: Sequence[StoredBlock]) -> Sequence[StoredBlock]:
        """These became reusable."""
        if self._policy == "after_hits":
            # Announced again, with the snapshot that it lacked when it was copied.
            return [block for block in blocks if block.hits >= self._after_hits]
        return blocks if self._policy == "write_through" else ()

    def hit(self, blocks: Sequence[StoredBlock]) -> Sequence[StoredBlock]:
        """A request has used these."""
        if self._policy != "after_hits":
            return ()
        return [block for block in blocks if block.hits == self._after_hits]

    def cooling(self, hashes: Sequence[bytes]) -> Sequence[StoredBlock]:
        """These will be evicted next, children first; they are copied parents first."""
        if self._policy != "on_eviction":
            return ()
        blocks = [block for block_hash in hashes if (block := self._residents.get(block_hash)) is not None]
        return sorted(blocks, key=lambda block: block.depth)
