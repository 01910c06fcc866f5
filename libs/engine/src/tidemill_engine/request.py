"""A request inside the engine: its tokens, where its KV is, and what it waits for."""

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidemill_engine.messages import RequestKey, Stage, Submit
from tidemill_engine.sampling_params import RequestState, SamplingParams
from tidemill_kvcache.sequence import CachedSequence

TokenArray = npt.NDArray[np.uint32]


class Phase(enum.Enum):
    """Where a request stands; see scheduler/__init__.py for who holds what in which phase."""

    WAITING = "waiting"
    ONBOARDING = "onboarding"
    RECEIVING = "receiving"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


class TokenBuffer:
    """Token ids of one request, growing at the end."""

    def __init__(self, token_ids: list[int]) -> None:
        self._length = len(token_ids)
        self._data: TokenArray = np.empty(max(64, self._length + 64), dtype=np.uint32)
        self._data[: self._length] = token_ids

    def __len__(self) -> int:
        return self._length

    def append(self, token_id: int) -> None:
        """Adds a token."""
        if self._length == len(self._data):
            self._data = np.concatenate([self._data, np.empty_like(self._data)])
        self._data[self._length] = token_id
        self._length += 1

    def view(self) -> TokenArray:
        """All tokens, without a copy."""
        return self._data[: self._length]

    def to_list(self, start: int = 0) -> list[int]:
        """Tokens from `start` on."""
        ids: list[int] = self._data[start : self._length].tolist()
        return ids


@dataclass(eq=False, slots=True)
class Request:
    """One choice of one attempt, from Submit to its last output or the end of its hold."""

    key: RequestKey
    stage: Stage
    tokens: TokenBuffer
    """Prompt, then all output, earlier attempts' included."""
    prompt_tokens: int
    sampling: SamplingParams
    chain_root: bytes
    tenant: str
    tenant_weight: float
    priority: int
    slo_ttft_s: float
    """Target of the time to first token; 0: none."""
    slo_tpot_s: float
    """Target of the time per output token; 0: none."""
    arrival_s: float
    deadline_s: float
    """On the scheduler's clock."""
    credit_tokens: int
    hold_s: float
    max_len: int
    """Most tokens that the request can have, prompt included."""
    queue_rank: float
    """Smaller is served earlier: arrival, moved forward by priority."""

    phase: Phase = Phase.WAITING
    seq: CachedSequence | None = None
    hash_chain: list[bytes] = field(default_factory=list)
    """Hashes of full blocks, extended as needed; shared with every `seq` the request opens."""
    num_computed_tokens: int = 0
    num_expected_tokens: int = 0
    """Leading tokens that the cache had when last looked at; what admission then finds may differ."""
    quota_tokens: int = 0
    """Policy "quota": prompt tokens that it may compute before it steps back."""
    num_yields: int = 0
    yielded_s: float = -1.0
    """When it last stepped back."""
    is_runaway: bool = False
    """Its output repeats itself, or is far longer than others of its class."""
    move_asked_s: float = -1.0
    """When another instance was first sought for it; -1: never."""
    move_refused: bool = False
    """There was none with room."""
    is_suspended: bool = False
    """Held in mid-output, to be fetched by another instance."""
    held_until_s: float = -1.0
    set_back_s: float = -1.0
    """When it gave way as a runaway; -1: never."""
    row: int = -1
    sequence_slot: int = -1
    in_runner: bool = False
    restore_snapshot_id: int = -1
    keep_sequence_state: bool = False
    """A hand-over has filled the sequence slot."""
    rounded_kv: bool = False
    """Its KV came from a less precise pool: its blocks are nobody else's."""

    num_cached_l1: int = -1
    """Prompt tokens found in L1 at the first admission; -1: not admitted yet."""
    num_cached_l2: int = 0
    num_cached_l3: int = 0
    first_output_sent: bool = False
    scheduled_s: float = -1.0
    """When its first tokens were scheduled."""
    last_token_s: float = -1.0
    last_step: int = -1
    stalled_since_s: float = -1.0
    """When it was first skipped for want of credit; -1: not stalled."""
    room_sought_s: float = -1.0
    """When it was first in the queue while a runaway held blocks; -1: it was not since it began to wait."""
    outgrown_since_s: float = -1.0
    """When it began to wait for a block to grow into; -1: it does not."""
    following_since_s: float = -1.0
    """When it began to wait for another request that computes its prefix; -1: it does not."""
    num_preemptions: int = 0
    num_overtaken: int = 0
    asked_onboard: bool = False
    """L3 was asked, or found not worth asking."""
    onboarded: bool = False
    """Blocks came from L2 or L3."""
    onboarded_l2_tokens: int = 0
    """Of them, tokens from L2."""
    local_tokens: int = 0
    """Tokens that L1 had when blocks were asked from L3, or when a transfer was asked from prefill."""
    num_reported_blocks: int = 0
    export_wanted: bool = False
    release_wanted: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, earlier attempts' included."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens whose KV is not computed; 1 for a request that decodes."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def output_class(self) -> tuple[str, int]:
        """Whose outputs tell how long its own will get."""
        return self.tenant, self.priority

    @property
    def num_uncached_tokens(self) -> int:
        """Known tokens that are neither computed nor expected to be cached."""
        return len(self.tokens) - max(self.num_computed_tokens, self.num_expected_tokens)

    @property
    def is_decoding(self) -> bool:
        """Only its last token is not computed."""
        return self.num_remaining_tokens == 1

    def state(self) -> RequestState:
        """What another engine needs to go on, beside the KV."""
        grammar = self.sampling.grammar
        return RequestState(
            prompt_tokens=self.prompt_tokens,
            committed_token_ids=self.tokens.to_list(),
            pending_token_id=int(self.tokens.view()[-1]),
            computed_tokens=self.num_computed_tokens,
            sampler_position=self.num_output_tokens,
            seed=self.sampling.seed,
            grammar_digest=grammar.digest if grammar else "",
            grammar_consumed_token_ids=self.tokens.to_list(self.prompt_tokens) if grammar else [],
            rounded_kv=self.rounded_kv,
        )


def make_request(submit: Submit, now_s: float, max_context_tokens: int, priority_aging_s: float) -> Request:
    """The request of a valid Submit, waiting."""
    return Request(
        key=submit.key,
        stage=submit.stage,
        tokens=TokenBuffer(submit.token_ids),
        prompt_tokens=submit.prompt_tokens,
        sampling=submit.sampling,
        chain_root=submit.hash_salt,
        tenant=submit.tenant,
        tenant_weight=submit.tenant_weight if submit.tenant_weight > 0 else 1.0,
        priority=submit.priority,
        slo_ttft_s=submit.slo_ttft_s,
        slo_tpot_s=submit.slo_tpot_s,
        arrival_s=now_s,
        deadline_s=now_s + submit.deadline_s,
        credit_tokens=submit.credit_tokens,
        hold_s=submit.hold_s,
        max_len=min(submit.prompt_tokens + submit.sampling.max_tokens, max_context_tokens),
        queue_rank=now_s - submit.priority * priority_aging_s,
    )
