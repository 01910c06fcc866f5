"""Pairs of instances between which no KV arrives, or damaged, as those who take it report: for lack of a router.

By instance, not by run of a domain: it knows no more of its targets.
"""

from tidemill_gateway.flow.local_placement import Shunned
from tidemill_mesh.load import LoadView


def shunned_by(loads: LoadView, fresh_s: float) -> Shunned:
    """What the reports of the last `fresh_s` say; older ones may tell of a quarantine that is over."""

    def shunned(taker: str) -> set[str]:
        fresh = [s.report for key, s in loads.samples.items() if key[0] == taker and loads.age_s(*key) <= fresh_s]
        damaged = {source for report in fresh for source in report.quarantined}
        return damaged.union(source.instance for report in fresh for source in report.silent)

    return shunned
