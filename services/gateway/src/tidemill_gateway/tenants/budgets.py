"""Counts what tenants use here and at other gateways, and refuses what would be more than their limits.

Every gateway counts the use of all: it takes what the others report out of its own buckets. So a tenant may use one
gateway or all of them and has the same limits, and what is used too much in between is bounded by the age of reports.
While reports do not travel, each gateway keeps to its share: the limit divided by the number of gateways.

Counts only grow, so that a lost report loses nothing. A gateway's first one counts in full for those that are older.
One that is younger, or has not heard that gateway for long, does not know when that was used, and takes over what is
left of the limits instead.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tidemill.mesh.v1.events_pb2 import TenantCount, TenantUse
from tidemill.v1 import errors_pb2
from tidemill_gateway.tenants.bucket import Bucket
from tidemill_gateway.tenants.limits import LimitTable, TenantLimits
from tidemill_mesh.errors import MeshError

SMOOTHING = 0.2
FIRST_GUESS_S = 1.0
MAX_RETRY_S = 300.0
MOST_REMEMBERED = 1024
"""Other gateways, also of those that are gone: one that comes back must not count anew."""

Incarnation = tuple[str, str]


@dataclass(slots=True)
class _Use:
    """One tenant here."""

    limits: TenantLimits
    requests_left: Bucket
    tokens_left: Bucket
    live: int = 0
    requests: int = 0
    tokens: int = 0
    mean_s: float = FIRST_GUESS_S
    """How long its requests take."""


@dataclass(slots=True)
class _Other:
    """What another gateway last said."""

    heard_at: float
    counts: dict[str, TenantCount] = field(default_factory=dict)


@dataclass(slots=True)
class _Known:
    """What a gateway has said so far, whatever its incarnation."""

    heard_at: float
    counts: dict[str, TenantCount] | None
    """None: too long ago to tell when more was used."""


class Charge:
    """Takes the tokens of one admitted request."""

    def __init__(self, use: _Use | None) -> None:
        self._use = use

    def tokens(self, count: int) -> None:
        """More tokens were used."""
        if self._use is not None:
            self._use.tokens += count
            self._use.tokens_left.take(count)


class Budgets:
    """All tenants that have limits; `share` is asked at each decision for this gateway's part of them."""

    def __init__(self, table: LimitTable, clock: Callable[[], float], share: Callable[[], float]) -> None:
        self.on_refused: Callable[[str], None] = lambda limit: None
        self._table = table
        self._clock = clock
        self._share = share
        self._uses: dict[str, _Use] = {}
        self._others: dict[Incarnation, _Other] = {}
        self._counts_id = secrets.token_hex(8)
        self._since = clock()
        self._known: dict[str, _Known] = {}
        """By the name of a gateway's counts; the one heard last comes last."""

    def weight(self, tenant: str) -> float:
        """The tenant's share relative to others'."""
        return self._table.of(tenant).weight

    @contextmanager
    def admitted(self, tenant: str) -> Iterator[Charge]:
        """Counts a request of a tenant for the time of the block; RESOURCE_EXHAUSTED beyond its limits."""
        limits = self._table.of(tenant)
        if not limits.any:
            yield Charge(None)
            return
        use = self._use(tenant, limits)
        self._check(tenant, use)
        use.live += 1
        use.requests += 1
        use.requests_left.take(1)
        start = self._clock()
        try:
            yield Charge(use)
        finally:
            use.live -= 1
            use.mean_s += SMOOTHING * (self._clock() - start - use.mean_s)

    # --- sharing -----------------------------------------------------------------------------------------------------

    def report(self) -> TenantUse:
        """What other gateways have to know, less who we are."""
        now, share = self._clock(), self._share()
        use = TenantUse(tenants=self.counts(), counts_id=self._counts_id, counting_s=now - self._since)
        for count in use.tenants:
            mine = self._uses[count.tenant]
            if mine.limits.requests_per_minute:
                count.requests_left = mine.requests_left.level(now, share)
            if mine.limits.tokens_per_minute:
                count.tokens_left = mine.tokens_left.level(now, share)
        return use

    def counts(self) -> list[TenantCount]:
        """What has been used here."""
        return [
            TenantCount(tenant=name, live_requests=use.live, requests=use.requests, tokens=use.tokens)
            for name, use in self._uses.items()
        ]

    def hear(self, gateway: Incarnation, said: TenantUse) -> None:
        """Takes what was used elsewhere since that gateway's last word out of our buckets."""
        now, share = self._clock(), self._share()
        # The last release does not name its counts.
        name = said.counts_id or "/".join(gateway)
        heard = self._known.pop(name, None)
        known = None if heard is None else heard.counts
        if heard is None and said.counts_id and said.counting_s <= now - self._since:
            known = {}
        for count in said.tenants:
            limits = self._table.of(count.tenant)
            if not limits.any:
                continue
            use = self._use(count.tenant, limits)
            if known is None:
                if count.HasField("requests_left"):
                    use.requests_left.at_most(count.requests_left, now, share)
                if count.HasField("tokens_left"):
                    use.tokens_left.at_most(count.tokens_left, now, share)
                continue
            before = known.get(count.tenant, TenantCount())
            use.requests_left.take_elsewhere(max(0, count.requests - before.requests))
            use.tokens_left.take_elsewhere(max(0, count.tokens - before.tokens))
        counts = {count.tenant: count for count in said.tenants}
        self._others[gateway] = _Other(now, counts)
        self._known[name] = _Known(now, counts)
        if len(self._known) > MOST_REMEMBERED:
            del self._known[next(iter(self._known))]

    def forget(self, silent_s: float, members: Iterable[Incarnation]) -> None:
        """Drops what gateways held that have left, or say nothing any more."""
        known, now = set(members), self._clock()
        for gateway, other in list(self._others.items()):
            if gateway not in known or now - other.heard_at > silent_s:
                del self._others[gateway]
        for heard in self._known.values():
            if now - heard.heard_at > silent_s:
                heard.counts = None

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _use(self, tenant: str, limits: TenantLimits) -> _Use:
        use = self._uses.get(tenant)
        if use is None:
            now = self._clock()
            use = _Use(limits, Bucket(limits.requests_per_minute, now), Bucket(limits.tokens_per_minute, now))
            self._uses[tenant] = use
        return use

    def _check(self, tenant: str, use: _Use) -> None:
        now, share, limits = self._clock(), self._share(), use.limits
        allowed = max(1, math.floor(limits.concurrent_requests * share))
        live = use.live + self._live_elsewhere(tenant)
        if limits.concurrent_requests and live >= allowed:
            # Requests end evenly spread over their mean time.
            wait_s = use.mean_s * (live - allowed + 1) / live
            raise self._refused("concurrent_requests", limits.concurrent_requests, "requests at once", wait_s)
        if limits.requests_per_minute and use.requests_left.level(now, share) < 1:
            wait_s = use.requests_left.wait_s(1, share)
            raise self._refused("requests_per_minute", limits.requests_per_minute, "requests a minute", wait_s)
        if limits.tokens_per_minute and use.tokens_left.level(now, share) <= 0:
            wait_s = use.tokens_left.wait_s(1, share)
            raise self._refused("tokens_per_minute", limits.tokens_per_minute, "tokens a minute", wait_s)

    def _live_elsewhere(self, tenant: str) -> int:
        counts = (other.counts.get(tenant) for other in self._others.values())
        return sum(count.live_requests for count in counts if count is not None)

    def _refused(self, name: str, limit: int, what: str, wait_s: float) -> MeshError:
        self.on_refused(name)
        return MeshError(
            errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED,
            f"the tenant's limit of {limit} {what} is reached",
            limit=f"{limit} {what}",
            retry_after_s=min(MAX_RETRY_S, max(0.05, wait_s)),
        )
