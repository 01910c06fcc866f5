"""Who is told of what a domain's leader reports."""

from typing import Protocol

from tidemill_engine import messages
from tidemill_worker.domain import Domain


class CacheObserver(Protocol):
    """Told of a domain's cache: KV events and L3 are observers."""

    def domain_up(self, domain: Domain) -> None:
        """A new epoch begins with an empty cache."""

    def domain_down(self, domain: Domain) -> None:
        """The epoch has ended."""

    def stored(self, domain: Domain, event: messages.BlocksStored) -> None:
        """Blocks became reusable."""

    def removed(self, domain: Domain, event: messages.BlocksRemoved) -> None:
        """Blocks left."""

    def snapshots_dropped(self, domain: Domain, event: messages.SnapshotsDropped) -> None:
        """Blocks go on without their snapshots."""

    def cleared(self, domain: Domain) -> None:
        """All blocks left."""

    def step_done(self, domain: Domain) -> None:
        """All events of a step have been told."""


class Onboarder(Protocol):
    """Answers what a domain asks and tells about the tiers below L1."""

    def wanted(self, domain: Domain, report: messages.OnboardWanted) -> None:
        """A request lacks blocks; OnboardReady must follow."""

    def pinned(self, domain: Domain, report: messages.BlocksPinned) -> None:
        """Answers PinBlocks."""

    def hit(self, domain: Domain, report: messages.BlocksHit) -> None:
        """A request found blocks in L1."""

    def cooling(self, domain: Domain, report: messages.BlocksCooling) -> None:
        """Blocks will be evicted soon."""


class LoadTracker(Protocol):
    """Keeps the latest sample of each domain."""

    def sampled(self, domain: Domain, sample: messages.LoadSample) -> None:
        """A domain reports its load."""
