"""What the CUDA backend needs of a machine; what is missing is named, nothing takes its place."""

import importlib.util

import torch

PACKAGES = ("flashinfer", "triton")
HEAD_DIMS = (64, 128, 256)


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
