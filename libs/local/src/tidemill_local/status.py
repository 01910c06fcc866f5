"""`tidemill status`: the mesh as text."""

from collections.abc import Iterable, Sequence

from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.mesh.v1.membership_pb2 import Role
from tidemill_local.mesh_view import Member, MeshView

HEADER = ("INSTANCE", "ROLE", "VERSION", "ENDPOINT", "SLO LOAD", "REQUESTS", "BLOCKS", "HIT RATE", "STATE")


def render(view: MeshView) -> str:
    """A table of instances, then what is held and what the autoscaler thinks."""
    rows = [row(member) for member in view.members.values()]
    held = view.held()
    lines = [*table([HEADER, *rows]), ""]
    lines.append("holds: " + (", ".join(f"{name}={count}" for name, count in sorted(held.items())) or "none"))
    for member in view.with_role(Role.ROLE_AUTOSCALER):
        lines += autoscaler_lines(member)
    return "\n".join(lines)


def row(member: Member) -> tuple[str, ...]:
    """One instance."""
    record = member.record
    role = Role.Name(record.role).removeprefix("ROLE_").lower()
    return (record.instance, role, record.version, record.endpoint, *figures(member), state(member))


def figures(member: Member) -> tuple[str, str, str, str]:
    """SLO load, requests, blocks and hit rate, where the role has them."""
    status = member.status
    if status is None:
        return ("-",) * 4
    match member.record.role:
        case Role.ROLE_PREFILL | Role.ROLE_DECODE:
            return worker_figures(list(status.loads))
        case Role.ROLE_ROUTER:
            blocks = f"{status.index_blocks} indexed"
            return ("-", str(sum(view.reservations for view in status.instances)), blocks, "-")
        case Role.ROLE_KVSTORE:
            used = f"{status.blocks} ({mebibytes(status.used_bytes)} of {mebibytes(status.capacity_bytes)})"
            return ("-", "-", used, "-")
        case Role.ROLE_GATEWAY:
            return ("-", str(status.holds.get("requests", "-")), "-", "-")
    return ("-",) * 4


def worker_figures(loads: Sequence[LoadReport]) -> tuple[str, str, str, str]:
    """A worker's domains taken together."""
    if not loads:
        return ("-",) * 4
    running, waiting = total(loads, "running_requests"), total(loads, "waiting_requests")
    used, cached = total(loads, "total_blocks") - total(loads, "available_blocks"), total(loads, "cached_blocks")
    prompt, hits = total(loads, "prompt_tokens_total"), total(loads, "cached_tokens_total")
    return (
        f"{max(load.ttft_slo_load for load in loads):.2f}/{max(load.tpot_slo_load for load in loads):.2f}",
        f"{running}+{waiting}",
        f"{used}/{cached}/{total(loads, 'total_blocks')}",
        f"{hits / prompt:.0%}" if prompt else "-",
    )


def total(loads: Iterable[LoadReport], name: str) -> int:
    """Sum of one field."""
    return sum(int(getattr(load, name)) for load in loads)


def state(member: Member) -> str:
    """In one word, or why there is no answer; and which steps of degraded service are on."""
    if member.problem:
        return member.problem
    word = "draining" if member.record.draining else "ok"
    if steps := degraded(member):
        word += f", degraded: {', '.join(steps)}"
    if sources := quarantined(member):
        word += f", takes nothing from: {', '.join(sources)}"
    if sources := silent(member):
        word += f", gets nothing from: {', '.join(sources)}"
    return word


def quarantined(member: Member) -> list[str]:
    """Instances whose bytes arrive damaged at a worker."""
    if member.record.role not in (Role.ROLE_PREFILL, Role.ROLE_DECODE) or member.status is None:
        return []
    return sorted({source for load in member.status.loads for source in load.quarantined})


def silent(member: Member) -> list[str]:
    """Instances whose bytes do not arrive at a worker."""
    if member.record.role not in (Role.ROLE_PREFILL, Role.ROLE_DECODE) or member.status is None:
        return []
    return sorted({source.instance for load in member.status.loads for source in load.silent})


def degraded(member: Member) -> list[str]:
    """Steps of degraded service that are on at an instance."""
    match member.record.role:
        case Role.ROLE_PREFILL | Role.ROLE_DECODE if member.status is not None:
            return sorted({step for load in member.status.loads for step in load.degraded})
        case Role.ROLE_ROUTER if member.status is not None:
            found = member.status.counters.items()
            return sorted(name.removeprefix("degraded_") for name, on in found if name.startswith("degraded_") and on)
        case Role.ROLE_GATEWAY if member.status is not None:
            return list(member.status.degraded)
    return []


def autoscaler_lines(member: Member) -> list[str]:
    """What the autoscaler keeps, if this one leads."""
    if member.status is None or not member.status.leader:
        return []
    return [
        f"{pool.role}: {pool.replicas} replicas ({pool.min_replicas}..{pool.max_replicas}), "
        f"{pool.starting} starting, {pool.draining} draining, SLO load {pool.slo_load:.2f}; {pool.last_decision}"
        for pool in member.status.pools
    ]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in rows]


def mebibytes(size_bytes: int) -> str:
    """A size for people."""
    return f"{size_bytes / (1 << 20):.0f} MiB"


LEGEND = "REQUESTS: running+waiting; BLOCKS: in use/cached/all; SLO LOAD: of first/further tokens, 1 = at the target."
