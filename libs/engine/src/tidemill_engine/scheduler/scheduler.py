"""Continuous batching of one cache domain under one token budget."""

from collections.abc import Callable, Hashable
from dataclasses import astuple

from tidemill_engine.messages import (
    Abort,
    AddCredit,
    BlocksPinned,
    EmitUntil,
    EngineError,
    ExportState,
    KVFailed,
    KVReady,
    LoadSample,
    MoveRefused,
    OnboardReady,
    Output,
    PinBlocks,
    Release,
    Report,
    RequestKey,
    ResetCache,
    Resume,
    RollAnswer,
    RollCall,
    Submit,
    Suspend,
    UnpinBlocks,
)
from tidemill_engine.request import Phase, make_request
from tidemill_engine.scheduler.chunks import min_chunk
from tidemill_engine.scheduler.commit import commit_step
from tidemill_engine.scheduler.decode_guard import relieve, update_pause
from tidemill_engine.scheduler.decodes import plan_decodes
from tidemill_engine.scheduler.lifecycle import add_credit, end, enqueue
from tidemill_engine.scheduler.moves import resume, suspend_all
from tidemill_engine.scheduler.output import build_output
from tidemill_engine.scheduler.plan import StepPlan
from tidemill_engine.scheduler.prefilled import export_state
from tidemill_engine.scheduler.prefills import plan_prefills
from tidemill_engine.scheduler.roll_call import call_roll, restore_credit
from tidemill_engine.scheduler.run_ahead import output_ahead, plan_ahead
from tidemill_engine.scheduler.small_chunks import SmallChunks
from tidemill_engine.scheduler.state import ModelLimits, SchedulerState, log
from tidemill_engine.scheduler.submit import check_fit, check_submit
from tidemill_engine.scheduler.transfers import kv_failed, kv_ready, onboard_ready
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import SchedulerOutput, StepResult
from tidemill_kvcache.cache import PrefixCache

SchedulerCommand = (
    Submit
    | Abort
    | AddCredit
    | Release
    | ExportState
    | Suspend
    | Resume
    | MoveRefused
    | KVReady
    | KVFailed
    | OnboardReady
    | PinBlocks
    | UnpinBlocks
    | ResetCache
    | RollCall
    | EmitUntil
)


class Scheduler:
    """Decides each step; commands and results come in between steps, on one thread."""

    def __init__(
        self, settings: EngineSettings, limits: ModelLimits, cache: PrefixCache, clock: Callable[[], float]
    ) -> None:
        self.state = SchedulerState(settings, limits, cache, clock)
        self._small_chunks = SmallChunks(self.state)
        self._step = 0
        self._plan: StepPlan | None = None
        self._ahead: StepPlan | None = None
        self._planned_s = 0.0

    @property
    def next_timer_s(self) -> float:
        """When, on the clock, something changes without a command; infinity: never."""
        return self.state.timers.next_due_s

    def handle(self, command: SchedulerCommand) -> None:
        """Takes a command of the service."""
        state = self.state
        match command:
            case Submit():
                self._submit(command)
            case AddCredit():
                if request := state.requests.get(command.key):
                    add_credit(state, request, command.tokens)
            case Abort():
                if request := state.requests.get(command.key):
                    end(state, request, "aborted")
            case Release():
                self._release(command.key)
            case ExportState():
                self._export(command.key)
            case Suspend():
                if command.key in state.requests:
                    state.suspending[command.key] = command
            case Resume():
                resume(state, command.key, state.clock())
            case MoveRefused():
                if request := state.requests.get(command.key):
                    request.move_refused = True
            case KVReady():
                kv_ready(state, command, state.clock())
            case KVFailed():
                kv_failed(state, command)
            case OnboardReady():
                onboard_ready(state, command)
            case PinBlocks():
                self._pin(command)
            case UnpinBlocks():
                self._unpin(command.pin_id)
            case ResetCache():
                log.info("cache_reset", num_blocks=state.cache.reset())
            case RollCall():
                call_roll(state, command.keys)
            case EmitUntil():
                restore_credit(state, zip(command.keys, command.totals, strict=True))

    def schedule(self) -> SchedulerOutput | None:
        """The next step; None when nothing can be computed before a command comes or a timer fires."""
        assert self._plan is None, "the last step was not committed"
        state = self.state
        self._planned_s = state.clock()
        state.timers.run_due(self._planned_s)
        suspend_all(state, self._planned_s)
        preemptions = state.load.preemptions_total
        plan = self._make_plan(self._planned_s)
        if plan.is_empty and state.load.preemptions_total > preemptions:
            plan = self._make_plan(self._planned_s)
        if plan.is_empty:
            return None
        self._plan = plan
        self._step += 1
        return build_output(state, plan, self._step)

    def schedule_ahead(self) -> SchedulerOutput | None:
        """The step after the one that is not committed yet; None when its result must be known first."""
        assert self._plan is not None, "there is no step to run ahead of"
        assert self._ahead is None, "one step ahead is all"
        self._ahead = plan_ahead(self.state, self._plan, self.state.clock())
        if self._ahead is None:
            return None
        self._step += 1
        return output_ahead(self._ahead, self._step)

    def commit(self, result: StepResult) -> None:
        """Takes the result of the oldest step that is not committed."""
        assert self._plan is not None, "there is no step to commit"
        plan, self._plan, self._ahead = self._plan, self._ahead, None
        now_s = self.state.clock()
        planned_s, self._planned_s = self._planned_s, now_s
        commit_step(self.state, plan, result, now_s - planned_s, now_s)

    def take_outputs(self) -> list[Output]:
        """Outputs since the last call."""
        outputs, self.state.outputs = self.state.outputs, []
        return outputs

    def take_notices(self) -> list[Report]:
        """Reports other than outputs since the last call."""
        notices, self.state.notices = self.state.notices, []
        return notices

    def take_roll_answers(self) -> list[RollAnswer]:
        """Answers to roll calls since the last call."""
        answers, self.state.roll_answers = self.state.roll_answers, []
        return answers

    def load_sample(self) -> LoadSample:
        """The domain's load now."""
        state, cache, load = self.state, self.state.cache, self.state.load
        now_s = state.clock()
        computing = [*state.waiting, *state.running, *state.transferring.values()]
        queued = [r for r in computing if r.stage != "decode" and not r.is_decoding] if load.cost.model.known else []
        prefill_tokens = sum(r.num_remaining_tokens for r in computing if r.stage != "decode" and not r.is_decoding)
        decoding = [len(request.tokens) for request in state.running if request.is_decoding]
        return LoadSample(
            waiting_requests=len(state.waiting) + len(state.transferring),
            running_requests=len(state.running),
            held_requests=len(state.held),
            waiting_prefill_tokens=prefill_tokens,
            total_blocks=cache.num_blocks,
            free_blocks=cache.free_blocks,
            available_blocks=cache.available_blocks,
            cached_blocks=cache.cached_blocks,
            pinned_blocks=cache.pinned_blocks,
            used_blocks=cache.used_blocks,
            prefill_tokens_per_s=load.cost.prefill_tokens_per_s,
            decode_step_s=load.cost.decode_step_s,
            predicted_ttft_s=sum(map(state.prefill_work_s, queued)) + load.cost.decode_step_s,
            measured_ttft_s=load.ttft_s.value(now_s),
            predicted_tpot_s=load.predicted_tpot_s(decoding, state.settings.max_num_seqs),
            measured_tpot_s=load.tpot_s.value(now_s),
            prompt_tokens_total=load.prompt_tokens_total,
            cached_tokens_total=load.cached_tokens_total,
            output_tokens_total=load.output_tokens_total,
            preemptions_total=load.preemptions_total,
            runaways_total=load.runaways_total,
            admission_paused=state.past_mark,
            degraded=self._small_chunks.degraded(now_s),
            step_cost=list(astuple(load.cost.model)) if load.cost.model.known else [],
            context_tokens=sum(len(request.tokens) for request in computing),
        )

    def _make_plan(self, now_s: float) -> StepPlan:
        state, settings = self.state, self.state.settings
        plan = StepPlan(self._small_chunks.budget(now_s))
        prefill_due = state.steps_since_prefill >= settings.prefill_every_steps - 1 and self._prefill_waits()
        kept_for_prefill = min_chunk(settings) if prefill_due else 0
        update_pause(state)
        plan_decodes(state, plan, plan.budget - kept_for_prefill, now_s)
        relieve(state, plan, now_s)
        plan_prefills(state, plan, now_s)
        if kept_for_prefill and plan.tokens_left > 0:
            plan_decodes(state, plan, len(plan.decodes) + plan.tokens_left, now_s)
        return plan

    def _prefill_waits(self) -> bool:
        state = self.state
        if any(not request.is_decoding for request in state.running):
            return True
        return len(state.waiting) > 0 and state.num_active < state.settings.max_num_seqs

    def _submit(self, submit: Submit) -> None:
        state = self.state
        if submit.key in state.requests or submit.key in state.reservations:
            log.warning("duplicate_submit", request_id=submit.key.request_id, attempt=submit.key.attempt)
            return
        error = check_submit(state, submit)
        if error is not None:
            first_position = len(submit.token_ids) - submit.prompt_tokens
            state.outputs.append(Output(key=submit.key, first_position=first_position, finish="error", error=error))
            return
        now_s = state.clock()
        request = make_request(submit, now_s, state.max_context_tokens, state.settings.priority_aging_s)
        state.requests[request.key] = request
        state.shares.enter(request.tenant)
        enqueue(state, request)
        error = check_fit(state, request)
        if error is not None:
            end(state, request, "error", error)
        elif len(request.tokens) >= request.max_len:
            end(state, request, "length")
        else:
            state.timers.at(request.deadline_s, self._deadline_passed, request.key)

    def _deadline_passed(self, key: Hashable, now_s: float) -> None:
        assert isinstance(key, RequestKey)
        request = self.state.requests.get(key)
        if request is not None and request.phase is not Phase.HELD and now_s >= request.deadline_s:
            end(self.state, request, "error", EngineError("DEADLINE_EXCEEDED", "the request's deadline has passed"))

    def _release(self, key: RequestKey) -> None:
        request = self.state.requests.get(key)
        if request is None:
            return
        if request.phase is Phase.HELD:
            end(self.state, request, "prefilled")
        else:
            request.release_wanted = True

    def _export(self, key: RequestKey) -> None:
        request = self.state.requests.get(key)
        if request is None:
            return
        if request.phase is Phase.HELD:
            export_state(self.state, request)
        else:
            request.export_wanted = True

    def _pin(self, command: PinBlocks) -> None:
        state = self.state
        if command.pin_id in state.pins:
            log.warning("duplicate_pin", pin_id=command.pin_id)
            return
        block_ids, snapshot_ids = state.cache.pin(command.pin_id, command.block_hashes)
        state.pins.add(command.pin_id)
        # A pin outlasts the transfer that it is for, whose own bound is transfer_limit_s.
        limit_s = 2 * state.settings.transfer_limit_s
        state.timers.at(state.clock() + limit_s, self._pin_over, command.pin_id)
        state.notices.append(BlocksPinned(command.pin_id, block_ids, snapshot_ids))

    def _unpin(self, pin_id: int) -> None:
        if pin_id in self.state.pins:
            self.state.pins.remove(pin_id)
            self.state.cache.unpin(pin_id)

    def _pin_over(self, pin_id: Hashable, now_s: float) -> None:
        assert isinstance(pin_id, int)
        if pin_id in self.state.pins:
            log.warning("pin_overdue", pin_id=pin_id, at_s=now_s)
            self._unpin(pin_id)
