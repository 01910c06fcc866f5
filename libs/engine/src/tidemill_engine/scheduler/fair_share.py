"""Weighted fair share between tenants: who has had more than others steps back while others wait.

A tenant is charged the larger of its share of each step's tokens and its share of the pool's blocks, times the step's
seconds, over its weight. A tenant that was away gets no credit for it: it comes back level with the least served one.
"""

from collections.abc import Iterable

from tidemill_engine.request import Request


class FairShare:
    """Seconds of the engine that each tenant has had; kept only while it has requests."""

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._charged_s: dict[str, float] = {}
        self._num_requests: dict[str, int] = {}

    @property
    def contended(self) -> bool:
        """More than one tenant has requests."""
        return len(self._num_requests) > 1

    def enter(self, tenant: str) -> None:
        """A request of the tenant came."""
        if tenant not in self._num_requests:
            self._charged_s[tenant] = min(self._charged_s.values(), default=0.0)
        self._num_requests[tenant] = self._num_requests.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """A request of the tenant has ended."""
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            del self._num_requests[tenant], self._charged_s[tenant]

    def charge(self, tokens: dict[Request, int], holders: Iterable[Request], num_blocks: int, step_s: float) -> None:
        """A step computed `tokens`, while `holders` held their blocks of a pool of `num_blocks`."""
        token_shares: dict[str, float] = {}
        block_shares: dict[str, float] = {}
        weights: dict[str, float] = {}
        all_tokens = max(1, sum(tokens.values()))
        for request, count in tokens.items():
            token_shares[request.tenant] = token_shares.get(request.tenant, 0.0) + count / all_tokens
        for request in holders:
            if request.seq is not None:
                held = len(request.seq.block_ids) / num_blocks
                block_shares[request.tenant] = block_shares.get(request.tenant, 0.0) + held
                weights[request.tenant] = request.tenant_weight
        for tenant, weight in weights.items():
            share = max(token_shares.get(tenant, 0.0), block_shares.get(tenant, 0.0))
            if tenant in self._charged_s:
                self._charged_s[tenant] += share * step_s / weight

    def arrange(self, requests: list[Request]) -> list[Request]:
        """The same order, but those of tenants that are ahead of the least served one by the burst come last."""
        if not self.contended:
            return requests
        limit_s = min((self._charged_s[r.tenant] for r in requests), default=0.0) + self._burst_s
        return sorted(requests, key=lambda request: self._charged_s[request.tenant] > limit_s)
