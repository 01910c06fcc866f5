"""Which models exist, by name and alias, and whether they can be used; dead workers never break the list."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from tidemill.mesh.v1.membership_pb2 import MembershipRecord, ModelCard, ModelRef
from tidemill.v1 import errors_pb2
from tidemill.v1.inference_pb2 import Model
from tidemill_gateway.models import fleet
from tidemill_gateway.models.assets import Assets
from tidemill_gateway.models.served_model import ServedModel, load_model
from tidemill_mesh.errors import MeshError
from tidemill_mesh.membership import InstanceView

RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)

log = structlog.get_logger()


@dataclass(slots=True)
class _Entry:
    """A revision that some worker serves or served."""

    ref: ModelRef
    last_seen: float
    model: ServedModel | None = None
    problem: str = "its card and tokenizer are being fetched"
    settled: bool = False
    """Loaded, or found to be unusable: it is not fetched again."""


class Catalog:
    """Models by the membership records; loads each new card once."""

    def __init__(
        self, instances: InstanceView, assets: Assets, linger_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._instances = instances
        self._assets = assets
        self._linger_s = linger_s
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._changed = asyncio.Event()
        self._loaded = asyncio.Condition()
        self._summary: fleet.FleetSummary | None = None

    async def run(self) -> None:
        """Follows the membership until cancelled."""
        # A run before this one that failed took its loads with it.
        self._entries = {digest: entry for digest, entry in self._entries.items() if entry.settled}
        unsubscribe = self._instances.subscribe(self._on_change)
        try:
            async with asyncio.TaskGroup() as loads:
                while True:
                    self._changed.clear()
                    for entry in self._refresh():
                        loads.create_task(self._load(entry), name=f"load model {entry.ref.name}")
                    await self._changed.wait()
        finally:
            unsubscribe()

    def resolve(self, name: str) -> ServedModel:
        """The revision of a name or alias to use for a new request; MODEL_NOT_FOUND, or UNAVAILABLE while it loads."""
        self._refresh_seen()
        found = [e for e in self._entries.values() if name == e.ref.name or name in e.ref.aliases]
        if not self._entries:
            raise MeshError(errors_pb2.ERROR_CODE_UNAVAILABLE, "no worker has shown up yet", retry_after_s=1)
        if not found:
            known = ", ".join(sorted({e.ref.name for e in self._entries.values()})) or "none"
            raise MeshError(
                errors_pb2.ERROR_CODE_MODEL_NOT_FOUND,
                f"model {name!r} is not served here (served: {known})",
                field="model",
            )
        loaded = [e for e in found if e.model is not None]
        if not loaded:
            raise MeshError(
                errors_pb2.ERROR_CODE_UNAVAILABLE, f"model {name!r} cannot be used: {found[0].problem}", retry_after_s=1
            )
        best = max(loaded, key=self._preference)
        assert best.model is not None, "only loaded entries are ranked"
        return best.model

    async def resolve_within(self, name: str, wait_s: float) -> ServedModel:
        """Like `resolve`, but gives a model that is being fetched some time."""
        try:
            return self.resolve(name)
        except MeshError as error:
            if error.code != errors_pb2.ERROR_CODE_UNAVAILABLE:
                raise
        try:
            async with asyncio.timeout(wait_s), self._loaded:
                await self._loaded.wait_for(lambda: self._is_loaded(name))
        except TimeoutError:
            pass
        return self.resolve(name)

    def models(self) -> list[Model]:
        """All models with a loaded card, one for each name, ready or not."""
        self._refresh_seen()
        best: dict[str, _Entry] = {}
        for entry in self._entries.values():
            known = best.get(entry.ref.name)
            if entry.model is not None and (known is None or self._preference(entry) > self._preference(known)):
                best[entry.ref.name] = entry
        return [self.describe(e.model) for _, e in sorted(best.items()) if e.model is not None]

    def describe(self, model: ServedModel) -> Model:
        """The public form of a model."""
        card = model.card
        return Model(
            name=card.name,
            aliases=card.aliases,
            revision=card.revision,
            context_tokens=card.context_tokens,
            vocab_size=card.vocab_size,
            ready=card.revision in self._fleet().ready,
            created_unix_s=card.created_unix_s,
        )

    def largest_pool_tokens(self, model: ServedModel) -> int:
        """Tokens of KV that one request can have at most; 0: not known now."""
        entry = next((e for e in self._entries.values() if e.model is model), None)
        blocks = self._fleet().pool_blocks.get(entry.ref.card_digest, 0) if entry else 0
        return blocks * model.card.block_size

    def any_ready(self) -> bool:
        """Whether at least one model can be used."""
        ready = self._fleet().ready
        return any(entry.model is not None and entry.ref.revision in ready for entry in self._entries.values())

    def _fleet(self) -> fleet.FleetSummary:
        if self._summary is None:
            self._summary = fleet.summarise(self._records())
        return self._summary

    def _records(self) -> list[MembershipRecord]:
        return list(self._instances.records.values())

    def _preference(self, entry: _Entry) -> tuple[bool, int, int]:
        summary = self._fleet()
        created = entry.model.card.created_unix_s if entry.model else 0
        return entry.ref.revision in summary.ready, summary.served_by[entry.ref.card_digest], created

    def _is_loaded(self, name: str) -> bool:
        return any(e.model and (name == e.ref.name or name in e.ref.aliases) for e in self._entries.values())

    def _on_change(self, old: MembershipRecord | None, new: MembershipRecord | None) -> None:
        if any(record is not None and fleet.is_worker(record) for record in (old, new)):
            self._summary = None
            self._changed.set()

    def _refresh(self) -> list[_Entry]:
        """Takes new cards in; returns those that have to be loaded."""
        self._refresh_seen()
        new = []
        for ref in fleet.model_refs(self._records()):
            if ref.card_digest not in self._entries:
                entry = self._entries[ref.card_digest] = _Entry(ref, self._clock())
                new.append(entry)
        return new

    def _refresh_seen(self) -> None:
        now = self._clock()
        served = self._fleet().served_by
        for digest, entry in list(self._entries.items()):
            if digest in served:
                entry.last_seen = now
            elif now - entry.last_seen > self._linger_s:
                del self._entries[digest]

    def _endpoints(self, card_digest: str) -> Sequence[str]:
        return [r.endpoint for r in self._records() if any(ref.card_digest == card_digest for ref in r.models)]

    async def _load(self, entry: _Entry) -> None:
        attempt = 0
        digest = entry.ref.card_digest
        while self._entries.get(digest) is entry:
            try:
                entry.model = await self._fetch(digest)
            except MeshError as error:
                entry.problem = error.message
                log.warning("a model cannot be fetched yet", model=entry.ref.name, reason=error.message)
                await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
                attempt += 1
                continue
            except Exception as error:
                # Of any kind: a load that raises would end those of the other models.
                entry.problem = f"{type(error).__name__}: {error}"
                entry.settled = True
                log.exception("a model cannot be served", model=entry.ref.name, reason=entry.problem)
                return
            entry.settled = True
            log.info("model known", model=entry.model.display_name)
            async with self._loaded:
                self._loaded.notify_all()
            return

    async def _fetch(self, card_digest: str) -> ServedModel:
        def endpoints() -> Sequence[str]:
            return self._endpoints(card_digest)

        card = ModelCard.FromString(await self._assets.get(card_digest, endpoints))
        parts = [
            await self._assets.get(digest, endpoints) if digest else b""
            for digest in (card.tokenizer_digest, card.chat_template_digest, card.tokenizer_config_digest)
        ]
        return await asyncio.to_thread(load_model, card, *parts)
