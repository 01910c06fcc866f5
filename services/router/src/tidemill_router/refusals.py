"""Why a request cannot be placed, as the errors that gateways are told."""

from collections.abc import Sequence

from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError
from tidemill_router.candidate import Candidate

RETRY_S = 1.0


def unavailable(role: str, revision: str, num_excluded: int) -> MeshError:
    """No usable instance of a role, though the model is known."""
    excluded = f" ({num_excluded} excluded by the request)" if num_excluded else ""
    return MeshError(
        errors_pb2.ERROR_CODE_UNAVAILABLE,
        f"no {role} instance can take requests of model revision {revision} now{excluded}",
        retry_after_s=RETRY_S,
    )


def no_room(revision: str) -> MeshError:
    """Usable instances are there, but none has room for a running request of another."""
    message = f"no other decode instance has room for a request of model revision {revision} now"
    return MeshError(errors_pb2.ERROR_CODE_UNAVAILABLE, message, retry_after_s=RETRY_S)


def model_not_found(revision: str) -> MeshError:
    """Nobody serves that revision, or ever has."""
    return MeshError(
        errors_pb2.ERROR_CODE_MODEL_NOT_FOUND, f"no instance serves model revision {revision}", field="model_revision"
    )


def invalid(field: str, message: str, limit: str) -> MeshError:
    """A field of the request has a wrong value."""
    return MeshError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, f"{field} {message}", field=field, limit=limit)


def check_fits(tokens: int, block_size: int, candidates: Sequence[Candidate]) -> None:
    """Refuses what no pool could ever hold."""
    largest = max(c.load.total_blocks or c.total_blocks for c in candidates)
    if largest and -(-(tokens + 1) // block_size) > largest:
        limit = largest * block_size - 1
        raise MeshError(
            errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG,
            f"{tokens} tokens do not fit the KV memory of any instance",
            field="prompt_tokens",
            limit=f"{limit} tokens",
        )


def check_queue(queue_s: float, max_queue_s: float) -> None:
    """Refuses what would wait longer than the operator allows."""
    if max_queue_s and queue_s > max_queue_s:
        raise MeshError(
            errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED,
            f"the shortest queue is {queue_s:.0f} seconds long",
            limit=f"{max_queue_s:g} seconds",
            retry_after_s=queue_s - max_queue_s,
        )
