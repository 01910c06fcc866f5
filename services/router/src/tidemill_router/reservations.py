"""Claims of placed requests on their targets. Each has an owner, a gateway's incarnation, and a deadline.

A reservation ends by a report, at its deadline without one, or with its gateway or its target. Until the target's own
load report can know of the request, the reservation counts as load.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill_kvcache.domain_track import Holder, holder_of
from tidemill_kvcache.hashing import Hashes
from tidemill_router.candidate import Claims
from tidemill_router.computed import ComputedPrompts
from tidemill_router.pending import PendingPrefixes
from tidemill_router.turnover import Turnover

IN_FLIGHT_S = 0.1
"""A request reaches its target so long after it was placed."""

PREFILL, DECODE, WHOLE, SOFT = "prefill", "decode", "whole", "soft"
KINDS = (PREFILL, DECODE, WHOLE, SOFT)

Owner = tuple[str, str]
"""(gateway instance, incarnation)."""


@dataclass(slots=True, eq=False)
class Reservation:
    """One claim; `soft` ones belong to a prefill reservation and end with it or with the decode placement."""

    id: str
    kind: str
    owner: Owner
    domain: DomainRef
    made_at_s: float
    deadline_at_s: float
    prefill_tokens: int = 0
    blocks: int = 0
    hashes: Hashes = b""
    request: tuple[str, int] = ("", 0)
    """(request id, choice)."""
    predicted_s: float = 0.0
    soft_id: str = ""
    prefill_id: str = ""
    """Of a soft claim: whose `soft_id` it is."""
    origin: str = ""
    """The replica that made it; empty: this router, or one that is gone."""


class Observer(Protocol):
    """Is told of each change."""

    def made(self, reservation: Reservation) -> None:
        """A claim was taken."""

    def prefilled(self, reservation_id: str) -> None:
        """A claim's prompt is computed."""

    def ended(self, reservation_id: str) -> None:
        """A claim ended."""


@dataclass
class Reservations:
    """All live reservations."""

    prefix: str
    """Of new ids; differs at each start of the router."""
    stand_s: float
    """Seconds without a report."""
    clock: Callable[[], float]
    turnover: Turnover
    observer: Observer | None = None
    pending: PendingPrefixes = field(default_factory=PendingPrefixes)
    ended: Counter[str] = field(default_factory=Counter)
    """Ended reservations by reason."""
    _live: dict[str, Reservation] = field(default_factory=dict)
    _by_target: dict[Holder, dict[str, Reservation]] = field(default_factory=dict)
    _soft_of_request: dict[tuple[str, int], str] = field(default_factory=dict)
    _next: int = 0

    def __post_init__(self) -> None:
        self.computed = ComputedPrompts(self.clock)

    def __len__(self) -> int:
        return len(self._live)

    def get(self, reservation_id: str) -> Reservation | None:
        """A live reservation."""
        return self._live.get(reservation_id)

    def count_by_kind(self) -> dict[str, int]:
        """Live reservations of each kind."""
        counts = Counter(r.kind for r in self._live.values())
        return {kind: counts[kind] for kind in KINDS}

    def on_target(self, holder: Holder) -> int:
        """Live reservations on a target, soft ones left out."""
        return sum(r.kind != SOFT for r in self._by_target.get(holder, {}).values())

    def reserve(
        self,
        kind: str,
        owner: Owner,
        domain: DomainRef,
        *,
        prefill_tokens: int = 0,
        blocks: int = 0,
        hashes: Hashes = b"",
        request: tuple[str, int] = ("", 0),
        predicted_s: float = 0.0,
        reservation_id: str = "",
        prefill_id: str = "",
        origin: str = "",
        age_s: float = 0.0,
    ) -> Reservation:
        """Takes a claim; a given id (of a router that was restarted, or of a replica) replaces what has it."""
        self._next += 1
        now = self.clock()
        new_id = reservation_id or f"{self.prefix}-{self._next}"
        replaced = self.end(new_id, "replaced")
        made = Reservation(
            new_id,
            kind,
            owner,
            domain,
            now - age_s,
            now + self.stand_s,
            prefill_tokens,
            blocks,
            hashes,
            request,
            predicted_s,
            prefill_id=prefill_id,
            origin=origin,
        )
        self._live[new_id] = made
        self._by_target.setdefault(holder_of(domain), {})[new_id] = made
        self.pending.add(holder_of(domain), hashes)
        if not replaced:
            self.turnover.add(holder_of(domain), prefill_tokens)
        if prefill_id in self._live:
            self._live[prefill_id].soft_id = new_id
            self._soft_of_request[request] = new_id
        if self.observer is not None:
            self.observer.made(made)
        return made

    def claim_decode(self, prefill: Reservation, domain: DomainRef, blocks: int) -> None:
        """A soft claim on where the request will probably decode; it stands and falls with the prefill's."""
        self.end(self._soft_of_request.get(prefill.request, ""), "replaced")
        self.reserve(SOFT, prefill.owner, domain, blocks=blocks, request=prefill.request, prefill_id=prefill.id)

    def settle_decode(self, request: tuple[str, int]) -> None:
        """The request gets its decode placement: the soft claim has served."""
        self.end(self._soft_of_request.get(request, ""), "settled")

    def renew(self, reservation_id: str) -> bool:
        """The gateway says that it lives; False: not known."""
        found = self._live.get(reservation_id)
        if found is None:
            return False
        found.deadline_at_s = self.clock() + self.stand_s
        if found.soft_id in self._live:
            self._live[found.soft_id].deadline_at_s = found.deadline_at_s
        return True

    def prefilled(self, reservation_id: str) -> bool:
        """The prompt is computed: not ahead of others any more, and in the index from now on; False: not known."""
        found = self._live.get(reservation_id)
        if found is None:
            return False
        self.pending.remove(holder_of(found.domain), found.hashes)
        self.computed.add(holder_of(found.domain), found.prefill_tokens)
        found.prefill_tokens, found.hashes = 0, b""
        if self.observer is not None:
            self.observer.prefilled(reservation_id)
        return self.renew(reservation_id)

    def end(self, reservation_id: str, reason: str) -> bool:
        """Ends a claim; False: not known."""
        found = self._live.pop(reservation_id, None)
        if found is None:
            return False
        holder = holder_of(found.domain)
        del self._by_target[holder][reservation_id]
        if not self._by_target[holder]:
            del self._by_target[holder]
        self.pending.remove(holder, found.hashes)
        if self._soft_of_request.get(found.request) == reservation_id:
            del self._soft_of_request[found.request]
        self.ended[reason] += 1
        if self.observer is not None:
            self.observer.ended(reservation_id)
        self.end(found.soft_id, reason)
        return True

    def expire(self) -> list[Reservation]:
        """Ends and returns those whose deadline has passed."""
        now = self.clock()
        return self._end_all((r for r in self._live.values() if r.deadline_at_s <= now), "deadline")

    def drop_owner(self, instance: str, *, keep_incarnation: str = "") -> list[Reservation]:
        """Ends what a gateway that is gone had."""
        gone = (r for r in self._live.values() if r.owner[0] == instance and r.owner[1] != keep_incarnation)
        return self._end_all(gone, "gateway_lost")

    def drop_target(self, instance: str, *, keep_incarnation: str = "") -> list[Reservation]:
        """Ends the claims on an instance that is gone."""
        gone = (
            r for r in self._live.values() if r.domain.instance == instance and r.domain.incarnation != keep_incarnation
        )
        return self._end_all(gone, "target_lost")

    def of_origin(self, origin: str) -> list[Reservation]:
        """What a replica has made; empty: what this router answers for."""
        return [reservation for reservation in self._live.values() if reservation.origin == origin]

    def heard_from(self, origin: str) -> None:
        """A replica lives, and ends its reservations itself."""
        deadline_at_s = self.clock() + self.stand_s
        for reservation in self.of_origin(origin):
            reservation.deadline_at_s = deadline_at_s

    def adopt(self, origin: str) -> None:
        """A replica is gone: this router answers for what it made, until their deadline."""
        self.heard_from(origin)
        for reservation in self.of_origin(origin):
            reservation.origin = ""

    def claims(self, holder: Holder, known_until_s: float) -> Claims:
        """What a load report that knows of requests up to `known_until_s` does not hold."""
        tokens = sequences = blocks = 0
        for reservation in self._by_target.get(holder, {}).values():
            if reservation.made_at_s + IN_FLIGHT_S > known_until_s or reservation.kind == SOFT:
                tokens += reservation.prefill_tokens
                sequences += reservation.kind in (DECODE, WHOLE)
                blocks += reservation.blocks
        return Claims(tokens, sequences, blocks)

    def _end_all(self, chosen: Iterable[Reservation], reason: str) -> list[Reservation]:
        listed = list(chosen)
        return [reservation for reservation in listed if self.end(reservation.id, reason)]
