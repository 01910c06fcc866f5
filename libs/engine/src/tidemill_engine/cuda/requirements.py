"""What the CUDA backend needs of a machine; what is missing is named, nothing takes its place."""

import importlib.util

import torch

from tidemill_engine.models.latent_config import IndexerConfig, LatentConfig
from tidemill_engine.models.stream_config import StreamConfig

PACKAGES = ("flashinfer", "triton")
HEAD_DIMS = (64, 128, 256)
LEAST_LATENT = 16
HOPPER = (9, 0)


class CudaUnavailable(RuntimeError):
    """The machine or the model does not fit the CUDA backend; the message says why."""


def require_machine() -> None:
    """Raises CudaUnavailable naming the device or the packages that are missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise CudaUnavailable(f"device = 'cuda' needs the packages {', '.join(missing)}")
    if not torch.cuda.is_available():
        raise CudaUnavailable("device = 'cuda', but torch sees no CUDA device")


def require_shape(head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """Raises CudaUnavailable for head shapes that the kernels do not take."""
    if head_dim not in HEAD_DIMS:
        raise CudaUnavailable(f"head_dim {head_dim} is not one of {HEAD_DIMS}")
    if num_heads % num_kv_heads:
        raise CudaUnavailable(f"{num_heads} query heads do not divide by {num_kv_heads} KV heads")


def require_latent_shape(latent: LatentConfig, indexer: IndexerConfig | None) -> None:
    """Raises CudaUnavailable for latents that the kernels do not take."""
    sizes = {"kv_lora_rank": latent.kv_rank, "qk_rope_head_dim": latent.rope_dim}
    if indexer is not None:
        sizes["index_head_dim"] = indexer.head_dim
    _require_powers_of_two(sizes)


def require_stream_shape(head_dim: int, streams: StreamConfig) -> None:
    """Raises CudaUnavailable for streams that the kernels do not take."""
    _require_powers_of_two({"head_dim": head_dim, "index_head_dim": streams.index_dim})
    if streams.rope_dim & (streams.rope_dim - 1):
        raise CudaUnavailable(f"qk_rope_head_dim {streams.rope_dim} is not a power of two")


def _require_powers_of_two(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size < LEAST_LATENT or size & (size - 1):
            raise CudaUnavailable(f"{name} {size} is not a power of two from {LEAST_LATENT} on")


def require_hopper(capability: tuple[int, int], what: str) -> None:
    """Raises CudaUnavailable for a device whose compute capability is not the one that `what` has kernels for."""
    if capability != HOPPER:
        has, needed = (".".join(map(str, version)) for version in (capability, HOPPER))
        raise CudaUnavailable(f"{what} need a device of compute capability {needed}, this one has {has}")
