"""`tidemill cache`: tiers, hit rates and top prefixes of the mesh as text."""

from collections.abc import Mapping, Sequence

from tidemill.mesh.v1.common_pb2 import TIER_L1, TIER_L2, Tier
from tidemill.mesh.v1.membership_pb2 import Role
from tidemill_local.mesh_view import Member, MeshView
from tidemill_local.status import mebibytes, table

WORKERS = ("INSTANCE", "ROLE", "L1", "L2", "PROMPT TOKENS", "HIT L1", "HIT L2", "HIT L3", "COMPUTED", "FROM PEERS")
STORES = ("INSTANCE", "BLOCKS", "USED", "HITS", "WRITTEN", "EVICTED", "DAMAGED", "TENANTS")
PREFIXES = ("PREFIX", "TOKENS", "HITS", "TENANT", "INSTANCES")
TOP = 10
SHORT_HASH = 12


def render(view: MeshView) -> str:
    """What workers hold and hit, what kvstores hold, and which prefixes are shared most."""
    workers = [m for m in view.with_role(Role.ROLE_PREFILL, Role.ROLE_DECODE) if m.status is not None]
    stores = [m for m in view.with_role(Role.ROLE_KVSTORE) if m.status is not None]
    lines = table([WORKERS, *(worker_row(member) for member in workers)])
    lines += ["", *table([STORES, *(store_row(member) for member in stores)])]
    lines += ["", *table([PREFIXES, *prefix_rows(workers)])]
    return "\n".join(lines)


def worker_row(member: Member) -> tuple[str, ...]:
    """One worker: blocks by tier, and where its prompts' tokens came from."""
    role = Role.Name(member.record.role).removeprefix("ROLE_").lower()
    counters: Mapping[str, int] = member.status.counters
    prompt = counters.get("prompt_tokens", 0)
    cached = [counters.get(f"cached_tokens_{tier}", 0) for tier in ("l1", "l2", "l3")]
    rates = [share(tokens, prompt) for tokens in (*cached, prompt - sum(cached))]
    peers = f"{counters.get('peer_blocks_onboarded', 0)} blocks"
    use = [tier_use(member, tier) for tier in (TIER_L1, TIER_L2)]
    return (member.record.instance, role, *use, str(prompt), *rates, peers)


def tier_use(member: Member, tier: "Tier.ValueType") -> str:
    """Blocks in a tier and its size; "-" where there is none."""
    for use in member.status.tiers:
        if use.tier == tier and use.capacity_blocks:
            return f"{use.used_blocks}/{use.capacity_blocks}"
    return "-"


def store_row(member: Member) -> tuple[str, ...]:
    """One kvstore."""
    status, counters = member.status, member.status.counters
    hits, missed = counters.get("blocks_hit", 0), counters.get("blocks_missed", 0)
    tenants = sorted(status.tenant_bytes.items(), key=lambda item: item[1], reverse=True)
    return (
        member.record.instance,
        str(status.blocks),
        f"{mebibytes(status.used_bytes)} of {mebibytes(status.capacity_bytes)}",
        f"{hits} of {hits + missed} asked",
        str(counters.get("written_blocks", 0)),
        str(counters.get("evicted_blocks", 0) + counters.get("over_quota_blocks", 0)),
        str(counters.get("damaged_blocks", 0)),
        ", ".join(f"{tenant or '?'} {mebibytes(size)}" for tenant, size in tenants[:3]) or "-",
    )


def prefix_rows(workers: Sequence[Member]) -> list[tuple[str, ...]]:
    """The prefixes that saved most tokens, all instances together."""
    hits: dict[bytes, int] = {}
    holders: dict[bytes, list[str]] = {}
    about = {}
    for member in workers:
        for prefix in member.status.hot_prefixes:
            hits[prefix.block_hash] = hits.get(prefix.block_hash, 0) + prefix.hits
            holders.setdefault(prefix.block_hash, []).append(member.record.instance)
            about[prefix.block_hash] = prefix
    best = sorted(hits, key=lambda block_hash: hits[block_hash] * about[block_hash].tokens, reverse=True)
    return [
        (
            block_hash.hex()[:SHORT_HASH],
            str(about[block_hash].tokens),
            str(hits[block_hash]),
            about[block_hash].tenant or "-",
            ", ".join(holders[block_hash]),
        )
        for block_hash in best[:TOP]
    ]


def share(part: int, whole: int) -> str:
    """In percent; "-" of nothing."""
    return f"{part / whole:.0%}" if whole else "-"


LEGEND = "L1, L2: blocks cached/room; HIT: share of prompt tokens by tier (L2: memory of this or another instance)."
