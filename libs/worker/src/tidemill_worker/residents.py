"""What a domain's L1 holds, as its leader reports it: chains, tenants and hits. Pure."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidemill_engine import messages

_MAX_FIRST_BLOCKS = 65536


class Tenants:
    """Whose prompt begins with a block; salts keep the chains of tenants apart."""

    def __init__(self) -> None:
        self._of_first_block: OrderedDict[bytes, str] = OrderedDict()

    def submitted(self, first_block: bytes, tenant: str) -> None:
        """A tenant's prompt begins with this block."""
        self._of_first_block[first_block] = tenant
        self._of_first_block.move_to_end(first_block)
        if len(self._of_first_block) > _MAX_FIRST_BLOCKS:
            self._of_first_block.popitem(last=False)

    def of(self, first_block: bytes) -> str:
        """The tenant, "" when it is not known."""
        return self._of_first_block.get(first_block, "")


@dataclass(slots=True, eq=False)
class StoredBlock:
    """A reusable block."""

    parent: bytes
    block_hash: bytes
    has_snapshot: bool
    tenant: str = ""
    depth: int = 1
    """Blocks of the prefix that it ends."""
    hits: int = 0


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that requests shared, and how many of them shared no more than it."""

    block_hash: bytes
    num_blocks: int
    hits: int
    ended: int
    tenant: str

    @property
    def weight(self) -> int:
        """Blocks that it alone has saved."""
        return self.ended * self.num_blocks


class Residents:
    """The blocks of one domain's L1."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._blocks: dict[bytes, StoredBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, block_hash: bytes) -> StoredBlock | None:
        """The block, if it is there."""
        return self._blocks.get(block_hash)

    def stored(self, event: messages.BlocksStored) -> list[StoredBlock]:
        """Enters a run; returns its blocks."""
        parent, run = event.parent_hash, []
        for block_hash, has_snapshot in zip(event.block_hashes, event.has_snapshot, strict=True):
            run.append(self._enter(parent, block_hash, has_snapshot))
            parent = block_hash
        return run

    def removed(self, hashes: Iterable[bytes]) -> None:
        """Blocks left."""
        for block_hash in hashes:
            self._blocks.pop(block_hash, None)

    def snapshots_dropped(self, hashes: Iterable[bytes]) -> None:
        """Blocks go on without their snapshots."""
        for block_hash in hashes:
            if (block := self._blocks.get(block_hash)) is not None:
                block.has_snapshot = False

    def cleared(self) -> None:
        """All blocks left."""
        self._blocks.clear()

    def hit(self, hashes: Iterable[bytes]) -> list[StoredBlock]:
        """A request found these; returns those that are known."""
        found = [block for block_hash in hashes if (block := self._blocks.get(block_hash)) is not None]
        for block in found:
            block.hits += 1
        return found

    def leading(self, hashes: Sequence[bytes]) -> int:
        """How many leading hashes are there."""
        return next((index for index, block_hash in enumerate(hashes) if block_hash not in self._blocks), len(hashes))

    def last_snapshot(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks, all of which are there, lie before the end of the last one with a snapshot."""
        depths = range(len(hashes), 0, -1)
        return next((depth for depth in depths if self._blocks[hashes[depth - 1]].has_snapshot), 0)

    def hottest(self, count: int) -> list[HotPrefix]:
        """The prefixes that saved most, each at the depth to which its hits were shared."""
        of_children: dict[bytes, int] = {}
        hit = [block for block in self._blocks.values() if block.hits]
        for block in hit:
            of_children[block.parent] = of_children.get(block.parent, 0) + block.hits
        found = [
            HotPrefix(block.block_hash, block.depth, block.hits, ended, block.tenant)
            for block in hit
            if (ended := block.hits - of_children.get(block.block_hash, 0)) > 0
        ]
        return sorted(found, key=lambda prefix: prefix.weight, reverse=True)[:count]

    def _enter(self, parent: bytes, block_hash: bytes, has_snapshot: bool) -> StoredBlock:
        block = self._blocks.get(block_hash)
        if block is None:
            above = self._blocks.get(parent)
            tenant = above.tenant if above else self._tenants.of(block_hash) if not parent else ""
            block = StoredBlock(parent, block_hash, has_snapshot, tenant, above.depth + 1 if above else 1)
            self._blocks[block_hash] = block
        block.has_snapshot = block.has_snapshot or has_snapshot
        return block
