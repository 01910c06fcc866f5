"""Fetches assets by sha256 from whichever live worker has them; what does not match its digest is refused."""

import asyncio
import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import structlog

from tidemill.mesh.v1.worker_pb2 import GetAssetRequest
from tidemill.mesh.v1.worker_pb2_grpc import WorkerServiceStub
from tidemill.v1 import errors_pb2
from tidemill_mesh.channels import Channels
from tidemill_mesh.errors import MeshError, from_rpc_error

FETCH_TIMEOUT_S = 60.0
MAX_ASSET_BYTES = 256 << 20

log = structlog.get_logger()


class Assets:
    """Assets by digest, kept on disk when a folder is given."""

    def __init__(self, channels: Channels, cache_dir: str) -> None:
        self._channels = channels
        self._folder = Path(cache_dir) if cache_dir else None

    async def get(self, digest: str, endpoints: Callable[[], Sequence[str]]) -> bytes:
        """The asset's bytes; UNAVAILABLE when none of the workers gives them."""
        cached = await asyncio.to_thread(self._read, digest)
        if cached is not None:
            return cached
        failures = []
        for endpoint in endpoints():
            try:
                data = await self._fetch(endpoint, digest)
            except MeshError as error:
                failures.append(f"{endpoint}: {error.message}")
                continue
            await asyncio.to_thread(self._write, digest, data)
            return data
        raise MeshError(errors_pb2.ERROR_CODE_UNAVAILABLE, f"no worker gives asset {digest}: {'; '.join(failures)}")

    async def _fetch(self, endpoint: str, digest: str) -> bytes:
        stub = WorkerServiceStub(self._channels.get(endpoint))
        data = bytearray()
        try:
            async for part in stub.GetAsset(GetAssetRequest(digest=digest), timeout=FETCH_TIMEOUT_S):
                data += part.data
                if len(data) > MAX_ASSET_BYTES:
                    raise MeshError(
                        errors_pb2.ERROR_CODE_TOO_LARGE, "the asset is too large", limit=f"{MAX_ASSET_BYTES} bytes"
                    )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise MeshError(errors_pb2.ERROR_CODE_INTERNAL, "the asset does not match its digest")
        return bytes(data)

    def _read(self, digest: str) -> bytes | None:
        if self._folder is None:
            return None
        try:
            data = (self._folder / digest).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("a cached asset cannot be read and is fetched again", digest=digest, reason=str(error))
            return None
        if hashlib.sha256(data).hexdigest() == digest:
            return data
        log.warning("a cached asset is damaged and is fetched again", digest=digest)
        return None

    def _write(self, digest: str, data: bytes) -> None:
        """Keeps the asset for the next start; without room or leave for that, the gateway works as well."""
        if self._folder is None:
            return
        # A name of its own: models that share a tokenizer, or gateways that share the folder, write it at once.
        partial = self._folder / f"{digest}.{os.getpid()}-{secrets.token_hex(4)}.partial"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_bytes(data)
                partial.replace(self._folder / digest)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            log.warning("an asset cannot be kept on disk", digest=digest, reason=str(error))
