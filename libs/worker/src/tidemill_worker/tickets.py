"""Tickets: who may fetch a request's KV. Unguessable, single use, bound to both cache domains and a deadline. Pure."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from tidemill.v1 import errors_pb2
from tidemill_engine.messages import RequestKey
from tidemill_mesh.errors import MeshError

SECRET_BYTES = 16


@dataclass(frozen=True)
class DomainId:
    """A run of a cache domain in a run of an instance."""

    instance: str
    incarnation: str
    domain: int
    epoch: str


@dataclass(frozen=True)
class TicketEntry:
    """What a secret stands for."""

    secret: bytes
    key: RequestKey
    prefill: DomainId
    decode: DomainId
    expires_at: float


class TicketBook:
    """The valid tickets of this instance, at most one for each request."""

    def __init__(self, clock: Callable[[], float], draw: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self._clock = clock
        self._draw = draw
        self._by_secret: dict[bytes, TicketEntry] = {}
        self._secret_of: dict[RequestKey, bytes] = {}

    def __len__(self) -> int:
        return len(self._by_secret)

    def mint(self, key: RequestKey, prefill: DomainId, decode: DomainId, ttl_s: float) -> TicketEntry:
        """A new ticket; it revokes the request's earlier one."""
        self.revoke(key)
        entry = TicketEntry(self._draw(SECRET_BYTES), key, prefill, decode, self._clock() + ttl_s)
        self._by_secret[entry.secret] = entry
        self._secret_of[key] = entry.secret
        return entry

    def redeem(self, secret: bytes, key: RequestKey, prefill: DomainId, decode: DomainId) -> TicketEntry:
        """Spends a ticket; STALE when it is unknown, spent, expired or bound to something else.

        A caller that knows the secret but names other bindings has lost the ticket too.
        """
        entry = self._by_secret.pop(secret, None)
        if entry is None:
            raise _stale("the ticket is unknown or spent")
        del self._secret_of[entry.key]
        if self._clock() >= entry.expires_at:
            raise _stale("the ticket has expired")
        if (entry.key, entry.prefill, entry.decode) != (key, prefill, decode):
            raise _stale("the ticket is bound to another request, incarnation or epoch")
        return entry

    def revoke(self, key: RequestKey) -> bool:
        """Ends the request's ticket; False when there is none."""
        secret = self._secret_of.pop(key, None)
        if secret is None:
            return False
        del self._by_secret[secret]
        return True

    def expire(self) -> list[TicketEntry]:
        """Ends the tickets whose time is over and returns them."""
        now = self._clock()
        over = [entry for entry in self._by_secret.values() if now >= entry.expires_at]
        for entry in over:
            self.revoke(entry.key)
        return over


def _stale(message: str) -> MeshError:
    return MeshError(errors_pb2.ERROR_CODE_STALE, message, field="ticket")
