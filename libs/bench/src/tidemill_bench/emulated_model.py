"""The ModelCard of the emulated workers: any tokenizer, no weights."""

import hashlib
from pathlib import Path

from tidemill.mesh.v1 import membership_pb2 as membership

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
CONTEXT_TOKENS = 65536


def emulated_card(tokenizer: str) -> tuple[membership.ModelCard, dict[str, bytes], membership.ModelRef]:
    """Card, assets by digest, and the reference that a membership record carries."""
    files = [Path(tokenizer).read_bytes(), CHAT_TEMPLATE.encode(), b"{}"]
    digests = [hashlib.sha256(data).hexdigest() for data in files]
    card = membership.ModelCard(
        name="emulated",
        revision="emulated",
        architecture="emulated",
        context_tokens=CONTEXT_TOKENS,
        vocab_size=1 << 16,
        block_size=32,
        kv_format="emulated",
        eos_token_ids=[2],
        tokenizer_digest=digests[0],
        chat_template_digest=digests[1],
        tokenizer_config_digest=digests[2],
        kv_bytes_per_token=1,
        hash_root=b"emulated",
    )
    data = card.SerializeToString(deterministic=True)
    digest = hashlib.sha256(data).hexdigest()
    model = membership.ModelRef(name="emulated", revision="emulated", card_digest=digest)
    return card, {**dict(zip(digests, files, strict=True)), digest: data}, model
