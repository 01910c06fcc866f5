"""The scheduler: pure Python, synchronous, with an injected clock; no torch, no asyncio.

What a request holds, by phase:

    phase       blocks              row   sequence slot   leaves by
    WAITING     -                   -     -               admission, Abort, deadline
    ONBOARDING  whole prompt        -     yes             OnboardReady or onboard_deadline_s -> WAITING
    RECEIVING   known tokens + 1    -     yes             KVReady -> RUNNING, KVFailed -> WAITING or the end
    RUNNING     whole prompt, grows yes   yes             last token, hold, preemption -> WAITING
    HELD        whole prompt        -     yes             Release, Abort, hold_s
                all computed        -     yes             the same, or Resume -> RUNNING (suspended for a move)
    FINISHED    -                   -     -

(The slot column counts only for models with per-sequence KV groups.) A request that leaves ONBOARDING or RECEIVING
while a transfer may still write into its blocks leaves them in a reservation, until the service says that the transfer
is over or `transfer_limit_s` has passed.
"""

from tidemill_engine.scheduler.scheduler import Scheduler, SchedulerCommand
from tidemill_engine.scheduler.state import ModelLimits

__all__ = ["ModelLimits", "Scheduler", "SchedulerCommand"]
