"""The ModelCard of the served model, and the files it names by digest."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

from tidemill.mesh.v1 import membership_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.messages import RankReady
from tidemill_mesh.errors import MeshError
from tidemill_worker.model_files import ModelFiles
from tidemill_worker.settings import WorkerSettings
from tidemill_worker.slabs import KVShape, shape_of

ASSET_PART_BYTES = 1 << 20

KINDS = {
    "paged": membership_pb2.KV_GROUP_KIND_PAGED,
    "window": membership_pb2.KV_GROUP_KIND_WINDOW,
    "state": membership_pb2.KV_GROUP_KIND_STATE,
}


class Assets:
    """Contents by sha256, in memory or on disk."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes | Path] = {}

    def add(self, content: bytes | Path) -> str:
        """Adds a content and returns its digest in hex; empty for an empty content."""
        data = content.read_bytes() if isinstance(content, Path) else content
        if not data:
            return ""
        digest = hashlib.sha256(data).hexdigest()
        self._contents[digest] = content
        return digest

    async def read(self, digest: str) -> AsyncIterator[bytes]:
        """The content in parts; NOT_FOUND for an unknown digest."""
        content = self._contents.get(digest)
        if content is None:
            raise MeshError(errors_pb2.ERROR_CODE_NOT_FOUND, "no asset of this digest is kept here", field="digest")
        data = await asyncio.to_thread(content.read_bytes) if isinstance(content, Path) else content
        for start in range(0, len(data), ASSET_PART_BYTES):
            yield data[start : start + ASSET_PART_BYTES]


def make_card(
    settings: WorkerSettings, files: ModelFiles, ready: RankReady, assets: Assets
) -> membership_pb2.ModelCard:
    """The card of a model that has been loaded; its files are added to the assets."""
    shape = shape_of(ready, settings.block_size)
    config = files.text_config
    architectures = files.config.get("architectures") or [config.get("model_type", "")]
    model_context = int(config.get("max_position_embeddings", 0))
    card = membership_pb2.ModelCard(
        name=settings.public_name,
        aliases=settings.aliases,
        revision=files.revision,
        architecture=architectures[0],
        context_tokens=min(model_context, settings.max_context_tokens or model_context),
        vocab_size=int(config["vocab_size"]),
        block_size=settings.block_size,
        kv_groups=[to_group(shape, spec) for spec in ready.kv_groups],
        kv_format=ready.kv_format,
        eos_token_ids=files.eos_token_ids,
        tokenizer_digest=assets.add(files.tokenizer),
        chat_template_digest=assets.add(files.chat_template),
        tokenizer_config_digest=assets.add(files.tokenizer_config),
        generation_config_json=files.generation_config_json,
        kv_bytes_per_token=shape.block_bytes // settings.block_size,
        hash_root=files.hash_root,
        created_unix_s=files.created_unix_s,
    )
    if files.bos_token_id is not None:
        card.bos_token_id = files.bos_token_id
    return card


def make_ref(card: membership_pb2.ModelCard, assets: Assets) -> membership_pb2.ModelRef:
    """Names the card; the card becomes an asset too."""
    digest = assets.add(card.SerializeToString(deterministic=True))
    return membership_pb2.ModelRef(
        name=card.name,
        aliases=card.aliases,
        revision=card.revision,
        card_digest=digest,
        kv_format=card.kv_format,
    )


def to_group(shape: KVShape, spec: KVGroupSpec) -> membership_pb2.KVGroup:
    """A KV group as the card tells it, over all ranks."""
    alone = KVShape((spec,), shape.block_size, shape.dtype)
    heads = (0, alone.num_heads if spec.sharded else 1)
    paged = spec.kind == "paged"
    return membership_pb2.KVGroup(
        name=spec.name,
        kind=KINDS[spec.kind],
        num_layers=len(spec.layers),
        dtype=spec.dtype,
        bytes_per_block=alone.piece_bytes(1, heads, with_sequence=False) if paged else 0,
        bytes_per_sequence=0 if paged else alone.piece_bytes(0, heads, with_sequence=True),
        boundary_tokens=shape.block_size,
        snapshot_interval_tokens=spec.snapshot_interval_tokens,
    )
