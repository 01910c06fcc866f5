"""API keys: a file maps keys to tenants; the gateway keeps only digests of them."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError

DEFAULT_TENANT = "default"
_TENANT = re.compile(r"[A-Za-z0-9._\-]{1,128}\Z")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


class KeyFileError(Exception):
    """The file of API keys cannot be used; the message names the line."""


class Keys:
    """Who a caller is."""

    def __init__(self, tenants: Mapping[str, str] | None) -> None:
        self._tenants = tenants
        """By digest; None: no keys are asked for."""

    @property
    def asked_for(self) -> bool:
        """Whether callers need a key."""
        return self._tenants is not None

    def tenant(self, authorization: str) -> str:
        """The tenant of an Authorization header; UNAUTHENTICATED without a known key."""
        if self._tenants is None:
            return DEFAULT_TENANT
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise MeshError(errors_pb2.ERROR_CODE_UNAUTHENTICATED, "an API key is needed: Authorization: Bearer KEY")
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            raise MeshError(errors_pb2.ERROR_CODE_UNAUTHENTICATED, "the API key is not known")
        return tenant


def load_keys(path: str) -> Keys:
    """Reads lines "KEY TENANT"; an empty path asks for no keys."""
    if not path:
        return Keys(None)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path}: {error}") from error
    tenants = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].split()
        if not content:
            continue
        if len(content) != 2 or not _TENANT.match(content[1]):
            raise KeyFileError(f'{path}, line {number}: must be "KEY TENANT"')
        key, tenant = content
        tenants[key if _DIGEST.match(key) else _digest(key)] = tenant
    if not tenants:
        raise KeyFileError(f"{path}: has no keys")
    return Keys(tenants)


def _digest(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
