"""Prefixes that placements under way will leave in a target's cache, so that what is shared is computed once."""

from collections import Counter

from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.hashing import HASH_BYTES, Hashes, common_blocks, pack


class PendingPrefixes:
    """Prompts of live reservations by target, as packed block hashes, counted."""

    def __init__(self) -> None:
        self._prompts: dict[Holder, Counter[bytes]] = {}

    def __len__(self) -> int:
        """Blocks of all prompts."""
        return sum(len(packed) for prompts in self._prompts.values() for packed in prompts) // HASH_BYTES

    def add(self, holder: Holder, hashes: Hashes) -> None:
        """A prompt is on its way to a target."""
        if hashes:
            self._prompts.setdefault(holder, Counter())[pack(hashes)] += 1

    def remove(self, holder: Holder, hashes: Hashes) -> None:
        """It has arrived, or will not."""
        prompts, packed = self._prompts.get(holder), pack(hashes)
        if prompts is None or packed not in prompts:
            return
        prompts[packed] -= 1
        if not prompts[packed]:
            del prompts[packed]
        if not prompts:
            del self._prompts[holder]

    def depth(self, holder: Holder, hashes: Hashes) -> int:
        """Leading blocks of a prompt that are pending at a target."""
        packed, depth = pack(hashes), 0
        first = packed[:HASH_BYTES]
        for prompt in self._prompts.get(holder, ()):
            if prompt.startswith(first):
                depth = max(depth, common_blocks(prompt, packed))
        return depth
