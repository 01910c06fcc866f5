"""Emulated workers: the whole WorkerService protocol around canned tokens. They compute nothing."""

import asyncio
import contextlib
import hashlib
import json
import secrets
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tidemill.mesh.v1 import worker_pb2 as pb
from tidemill.mesh.v1.common_pb2 import DomainRef, InstanceRef
from tidemill.mesh.v1.membership_pb2 import (
    ROLE_DECODE,
    ROLE_PREFILL,
    DomainRecord,
    MembershipRecord,
    ModelCard,
    ModelRef,
)
from tidemill.mesh.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from tidemill.v1 import errors_pb2
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.errors import MeshError
from tidemill_mesh.membership import Membership
from tidemill_mesh.server import Servicer, serve_grpc

EOS = 258
VOCAB = 264
CONTEXT = 1024
TEXT = (
    "It is a truth universally acknowledged, that a worker in possession of a good pool must be in want of a prompt. "
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Answer = Callable[[list[int], int, int], int]
"""(prompt token ids, choice, position) -> token id."""


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, and three special ones."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in set(kept)]
    vocab = {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(moved)}
    assert set(vocab) == set(alphabet)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def canned(text: str, *, ends: bool = True) -> Answer:
    """Bytes of a text, then the end of sequence (or the text again)."""
    data = text.encode()
    return lambda _prompt, _choice, position: data[position % len(data)] if not ends or position < len(data) else EOS


@dataclass
class Assets:
    """A model's card and files by digest."""

    card: ModelCard
    by_digest: dict[str, bytes]

    @property
    def ref(self) -> ModelRef:
        digest = hashlib.sha256(self.card.SerializeToString()).hexdigest()
        return ModelRef(name=self.card.name, aliases=self.card.aliases, revision=self.card.revision, card_digest=digest)


def tiny_assets(name: str = "tiny", template: str = CHAT_TEMPLATE, **card_fields: Any) -> Assets:
    files = {
        "tokenizer_digest": byte_tokenizer().to_str().encode(),
        "chat_template_digest": template.encode(),
        "tokenizer_config_digest": json.dumps({"eos_token": "<|im_end|>"}).encode(),
    }
    digests = {field_name: hashlib.sha256(data).hexdigest() for field_name, data in files.items()}
    given: dict[str, Any] = {
        "name": name,
        "aliases": [f"{name}-alias"],
        "revision": f"rev-{name}",
        "context_tokens": CONTEXT,
        "vocab_size": VOCAB,
        "block_size": 16,
        "eos_token_ids": [EOS],
        "hash_root": b"root",
        "created_unix_s": 1_700_000_000,
    }
    card = ModelCard(**(given | digests | card_fields))
    by_digest = {digests[field_name]: data for field_name, data in files.items()}
    serialised = card.SerializeToString()
    by_digest[hashlib.sha256(serialised).hexdigest()] = serialised
    return Assets(card, by_digest)


@dataclass
class Running:
    """One submitted stage."""

    submit: pb.Submit
    position: int
    credit: int
    prompt: list[int]
    first: bool = True


Key = tuple[str, int, int]


@dataclass
class EmulatedWorker(WorkerServiceServicer):
    """A prefill or decode worker with canned tokens; `die` and `freeze` are its ways to fail."""

    role: int
    assets: Assets
    answer: Answer
    fleet: dict[str, "EmulatedWorker"]
    instance: str
    incarnation: str = ""
    step_s: float = 0.001
    num_blocks: int = 256
    frozen: bool = False
    paused: bool = False
    """Lives, and gives no outputs."""
    die_at: int = -1
    """Position at which it dies instead of sending the token."""
    loses_credit: bool = False
    """All but what a roll call says of it."""
    refuse: MeshError | None = None
    """Ends the next stage with this error."""
    submits: list[pb.Submit] = field(default_factory=list)
    aborts: list[pb.RequestKey] = field(default_factory=list)
    held: set[Key] = field(default_factory=set)
    running: dict[Key, Running] = field(default_factory=dict)
    connections: int = 0
    stop_now: Callable[[], None] = lambda: None

    # --- WorkerService -----------------------------------------------------------------------------------------------

    async def Connect(self, requests: Any, context: Any) -> AsyncIterator[pb.ConnectResponse]:  # type: ignore[override]
        outbox: asyncio.Queue[pb.ConnectResponse] = asyncio.Queue()
        mine: set[Key] = set()
        self.connections += 1
        tasks = [
            asyncio.create_task(self._listen(requests, outbox, mine)),
            asyncio.create_task(self._step(outbox, mine)),
        ]
        try:
            while True:
                getter = asyncio.ensure_future(outbox.get())
                await asyncio.wait([getter, *tasks], return_when="FIRST_COMPLETED")
                for task in tasks:
                    if task.done():
                        getter.cancel()
                        task.result()
                        return
                response = await getter
                while self.frozen:
                    await asyncio.sleep(0.01)
                yield response
        finally:
            self.connections -= 1
            for task in tasks:
                task.cancel()
            for key in mine:
                self.running.pop(key, None)
                self.held.discard(key)

    async def GetAsset(self, request: pb.GetAssetRequest, context: Any) -> AsyncIterator[pb.GetAssetResponse]:  # type: ignore[override]
        data = self.assets.by_digest.get(request.digest)
        if data is None:
            raise MeshError(errors_pb2.ERROR_CODE_NOT_FOUND, "no such asset")
        for start in range(0, len(data), 1000):
            yield pb.GetAssetResponse(data=data[start : start + 1000])

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Any) -> AsyncIterator[pb.GetSnapshotResponse]:  # type: ignore[override]
        yield pb.GetSnapshotResponse(domain=domain_of(self), last=True, model_revision=self.assets.card.revision)

    # --- emulation ---------------------------------------------------------------------------------------------------

    async def _listen(self, requests: Any, outbox: "asyncio.Queue[pb.ConnectResponse]", mine: set[Key]) -> None:
        async for request in requests:
            if request.HasField("hello"):
                if request.hello.expected_incarnation != self.incarnation:
                    raise MeshError(errors_pb2.ERROR_CODE_STALE, "another incarnation")
                ref = InstanceRef(instance=self.instance, incarnation=self.incarnation)
                outbox.put_nowait(pb.ConnectResponse(welcome=pb.Welcome(instance=ref, model=self.assets.ref)))
            for submit in request.submits:
                self._take(submit, mine)
            for key in request.aborts:
                self.aborts.append(key)
                self.release((key.request_id, key.choice, key.attempt))
            for credit in request.credits:
                running = self.running.get(_key(credit.key))
                if running is not None and not self.loses_credit:
                    running.credit += credit.tokens
            for hand_over in request.hand_overs:
                ticket = pb.Ticket(secret=secrets.token_bytes(16), decode=hand_over.target.domain)
                offer = pb.TicketOffer(key=hand_over.key, ticket=ticket)
                outbox.put_nowait(pb.ConnectResponse(tickets=[offer]))
            if request.HasField("roll_call"):
                missing = [key for key in request.roll_call.keys if _key(key) not in self.running]
                outbox.put_nowait(pb.ConnectResponse(missing=missing))
                for key, until in zip(request.roll_call.keys, request.roll_call.emit_until, strict=True):
                    running = self.running.get(_key(key))
                    if running is not None and until:
                        running.credit = max(running.credit, until - running.position)
            if request.ping:
                outbox.put_nowait(pb.ConnectResponse(pong=True))

    def _take(self, submit: pb.Submit, mine: set[Key]) -> None:
        self.submits.append(submit)
        tokens = array("I", submit.token_ids).tolist()
        position = len(tokens) - submit.prompt_tokens
        if submit.stage == pb.Submit.STAGE_DECODE:
            position += 1
        key = _key(submit.key)
        mine.add(key)
        self.running[key] = Running(submit, position, submit.credit_tokens, tokens[: submit.prompt_tokens])

    def release(self, key: Key) -> None:
        self.running.pop(key, None)
        self.held.discard(key)

    async def _step(self, outbox: "asyncio.Queue[pb.ConnectResponse]", mine: set[Key]) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if self.frozen or self.paused:
                continue
            outputs = [o for key in list(mine) if (o := self._advance(key, mine)) is not None]
            if outputs:
                outbox.put_nowait(pb.ConnectResponse(step=pb.StepOutputs(outputs=outputs)))

    def _advance(self, key: Key, mine: set[Key]) -> pb.Output | None:
        running = self.running.get(key)
        if running is None:
            mine.discard(key) if key not in self.held else None
            return None
        submit = running.submit
        if running.position == self.die_at:
            self.die()
            return None
        if self.refuse is not None:
            detail, self.refuse = self.refuse.to_detail(), None
            self.release(key)
            return pb.Output(key=submit.key, finish=pb.FINISH_ERROR, error=detail)
        if running.credit <= 0:
            return None
        if running.first and submit.stage == pb.Submit.STAGE_DECODE and not self._kv_is_ready(submit):
            return None
        output = pb.Output(key=submit.key, first_position=running.position)
        if running.first:
            running.first = False
            output.cached.l1 = 16
            if submit.stage == pb.Submit.STAGE_PREFILL:
                output.hand_over_due = True
                return output
            if submit.stage == pb.Submit.STAGE_DECODE:
                output.hand_over_done = True
                self.fleet[submit.source.prefill.domain.instance].release(key)
        token = self.answer(running.prompt, submit.key.choice, running.position)
        output.token_ids.append(token)
        if submit.sampling.logprobs:
            self._add_logprobs(output, token, submit.sampling.top_logprobs)
        running.position += 1
        running.credit -= 1
        output.finish = self._finish(running, token)
        if output.finish:
            del self.running[key]
            if output.finish == pb.FINISH_PREFILLED:
                self.held.add(key)
        return output

    def _kv_is_ready(self, submit: pb.Submit) -> bool:
        return _key(submit.key) in self.fleet[submit.source.prefill.domain.instance].held

    def _finish(self, running: Running, token: int) -> "pb.Finish.ValueType":
        sampling = running.submit.sampling
        if token in sampling.stop_token_ids:
            return pb.FINISH_STOP
        if running.position >= sampling.max_tokens:
            return pb.FINISH_LENGTH
        return pb.FINISH_PREFILLED if running.submit.stage == pb.Submit.STAGE_PREFILL else pb.FINISH_UNSPECIFIED

    def _add_logprobs(self, output: pb.Output, token: int, top: int) -> None:
        others = [(token + 1 + i) % 256 for i in range(top)]
        output.logprobs.add(
            logprob=-0.5, rank=top + 1, top_token_ids=others, top_logprobs=[-0.1 * (i + 1) for i in range(top)]
        )

    def die(self) -> None:
        """Like kill -9: streams break, nothing is said."""
        self.die_at = -1
        # Its server takes a moment to stop.
        self.frozen = True
        self.stop_now()

    @property
    def holds(self) -> int:
        return len(self.running) + len(self.held)


def _key(key: pb.RequestKey) -> Key:
    return key.request_id, key.choice, key.attempt


@contextlib.asynccontextmanager
async def serving(worker: EmulatedWorker, mesh: ServiceSettings) -> AsyncIterator[EmulatedWorker]:
    """Registers the worker and serves until the block ends, or the worker dies and leaves its record behind."""
    stop = asyncio.Event()
    worker.stop_now = stop.set
    servicer = Servicer(add_WorkerServiceServicer_to_server, worker, "tidemill.mesh.v1.WorkerService")
    membership = Membership(mesh)
    await membership.start()
    worker.incarnation = membership.incarnation
    worker.fleet[worker.instance] = worker
    async with serve_grpc(mesh, [servicer]) as server:
        server.set_serving(True)
        record = MembershipRecord(
            instance=worker.instance,
            role=worker.role,  # type: ignore[arg-type]
            endpoint=server.endpoint,
            domains=[DomainRecord(epoch="e1", num_blocks=worker.num_blocks)],
            models=[worker.assets.ref],
        )
        registration = await membership.register(record)

        async def kill() -> None:
            await stop.wait()
            await server.stop(0.0)

        killer = asyncio.create_task(kill())
        try:
            yield worker
        finally:
            killer.cancel()
            with contextlib.suppress(MeshError, grpc.RpcError):
                await registration.deregister()
            await membership.close()


def new_worker(role: int, assets: Assets, answer: Answer, fleet: dict[str, EmulatedWorker]) -> EmulatedWorker:
    kind = {ROLE_PREFILL: "prefill", ROLE_DECODE: "decode"}[role]  # type: ignore[index]
    return EmulatedWorker(role, assets, answer, fleet, f"emulated-{kind}-{secrets.token_hex(3)}")


def domain_of(worker: EmulatedWorker) -> DomainRef:
    return DomainRef(instance=worker.instance, incarnation=worker.incarnation, domain=0, epoch="e1")
