"""Degraded step "no_hand_overs": prefill instances are there, and no decode instance takes KV of any of them.

Placements have decode instances compute prompts then, which no request fails by; that every pair has been shut out is
nothing to pass over in silence, since a fault of all lines, or transfers that are slow everywhere, looks like this.
"""

import structlog

from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL
from tidemill_router.pairs import with_a_taker
from tidemill_router.view import MeshView

NAME = "no_hand_overs"

log = structlog.get_logger()


class NoHandOvers:
    """The models for which the step is on."""

    def __init__(self) -> None:
        self._on: set[str] = set()

    @property
    def num_on(self) -> int:
        return len(self._on)

    def observe(self, view: MeshView) -> None:
        """Takes the load reports as they are now; to be called a few times a second."""
        now_on = set()
        some_shut = view.num_quarantined_pairs > 0
        for revision in {model.revision for record in view.workers() for model in record.models} if some_shut else ():
            prefills, decodes = view.candidates(ROLE_PREFILL, revision), view.candidates(ROLE_DECODE, revision)
            if prefills and decodes and not with_a_taker(prefills, decodes):
                now_on.add(revision)
        for revision in now_on ^ self._on:
            log.warning("degraded", step=NAME, on=revision in now_on, revision=revision)
        self._on = now_on
