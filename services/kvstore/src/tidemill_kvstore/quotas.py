"""How many bytes a tenant's blocks may take. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Quotas:
    """One limit for all tenants, and others for some; 0: none."""

    default_bytes: int = 0
    by_tenant: Mapping[str, int] = field(default_factory=dict)

    def of(self, tenant: str) -> int:
        """The tenant's limit in bytes, 0 when it has none."""
        return self.by_tenant.get(tenant, self.default_bytes)


def parse_quotas(default_bytes: int, items: Iterable[str]) -> Quotas:
    """Quotas from "tenant=bytes"; ValueError names the item that is none."""
    by_tenant = {}
    for item in items:
        tenant, _, amount = item.rpartition("=")
        if not tenant or not amount.strip().isdigit():
            raise ValueError(f"tenant_quotas: {item!r} is not tenant=bytes")
        by_tenant[tenant.strip()] = int(amount)
    return Quotas(default_bytes, by_tenant)
