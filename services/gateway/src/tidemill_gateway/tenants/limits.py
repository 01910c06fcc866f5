"""What tenants may use: a TOML file with a table for all and one for each tenant that differs."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

MAX_LIMIT = 1 << 40
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0


class LimitsFileError(Exception):
    """The file of limits cannot be used; the message names the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Over all gateways of the mesh; 0: no limit."""

    concurrent_requests: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Prompt and output tokens; cached ones count too."""
    weight: float = 1.0
    """No limit: the tenant's share of an engine that others wait for as well, relative to theirs."""

    @property
    def any(self) -> bool:
        """Whether anything is limited."""
        return bool(self.concurrent_requests or self.requests_per_minute or self.tokens_per_minute)


@dataclass(frozen=True, slots=True)
class LimitTable:
    """The limits and weights of every tenant."""

    default: TenantLimits
    tenants: Mapping[str, TenantLimits]

    def of(self, tenant: str) -> TenantLimits:
        """A tenant's own limits, else those for all."""
        return self.tenants.get(tenant, self.default)

    @property
    def any(self) -> bool:
        """Whether any tenant is limited."""
        return self.default.any or any(limits.any for limits in self.tenants.values())


def load_limits(path: str) -> LimitTable:
    """Reads `[default]` and `[tenants.NAME]`; an empty path limits nobody. What a tenant's table leaves out is as for
    all."""
    if not path:
        return LimitTable(TenantLimits(), {})
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LimitsFileError(f"{path}: {error}") from error
    unknown = content.keys() - {"default", "tenants"}
    if unknown:
        raise LimitsFileError(f"{path}: unknown table {min(unknown)!r}")
    default = _limits(path, "default", content.get("default", {}), TenantLimits())
    tables = content.get("tenants", {})
    if not isinstance(tables, dict):
        raise LimitsFileError(f"{path}: tenants must be a table of tables")
    return LimitTable(default, {name: _limits(path, f"tenants.{name}", t, default) for name, t in tables.items()})


def _limits(path: str, name: str, table: Any, base: TenantLimits) -> TenantLimits:
    if not isinstance(table, dict):
        raise LimitsFileError(f"{path}: {name} must be a table")
    known = {item.name for item in fields(TenantLimits)}
    for key, value in table.items():
        if key not in known:
            raise LimitsFileError(f"{path}: {name}.{key} is not a limit; limits are {', '.join(sorted(known))}")
        if key == "weight":
            if isinstance(value, bool) or not isinstance(value, int | float) or not MIN_WEIGHT <= value <= MAX_WEIGHT:
                raise LimitsFileError(f"{path}: {name}.weight must be a number in [{MIN_WEIGHT:g}..{MAX_WEIGHT:g}]")
        elif not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_LIMIT:
            raise LimitsFileError(f"{path}: {name}.{key} must be a whole number in [0..{MAX_LIMIT}]")
    return TenantLimits(**{key: table.get(key, getattr(base, key)) for key in known})
