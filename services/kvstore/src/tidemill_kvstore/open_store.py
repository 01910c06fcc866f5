"""The block store that the settings describe."""

from pathlib import Path
from typing import cast

from obstore.store import S3Store

from tidemill_kvstore.block_store import BlockStore
from tidemill_kvstore.object_store import ObjectBlockStore
from tidemill_kvstore.quotas import parse_quotas
from tidemill_kvstore.settings import KvStoreSettings
from tidemill_kvstore.store import FsyncPolicy, SegmentStore

_SCHEME = "s3://"


def open_store(settings: KvStoreSettings) -> BlockStore:
    """Opens it and learns what is there; ValueError names a setting that is wrong."""
    quotas = parse_quotas(settings.tenant_quota_bytes, settings.tenant_quotas)
    if not settings.object_url:
        folder, fsync = Path(settings.data_dir).expanduser(), cast(FsyncPolicy, settings.fsync)
        return SegmentStore(folder, settings.capacity_bytes, settings.segment_bytes, fsync, quotas)
    return ObjectBlockStore(
        open_bucket(settings),
        settings.capacity_bytes,
        min(settings.segment_bytes, settings.capacity_bytes),
        quotas,
        settings.object_list_s,
    )


def open_bucket(settings: KvStoreSettings) -> S3Store:
    """The bucket of object_url, cut to its prefix; makes no request."""
    bucket, _, prefix = settings.object_url.removeprefix(_SCHEME).partition("/")
    if not settings.object_url.startswith(_SCHEME) or not bucket:
        raise ValueError(f"object_url: {settings.object_url!r} is not s3://bucket/prefix")
    options: dict[str, object] = {"region": settings.object_region}
    if settings.object_endpoint:
        options["endpoint"] = settings.object_endpoint
    if settings.object_access_key:
        options["access_key_id"] = settings.object_access_key
        options["secret_access_key"] = settings.object_secret_key
    return S3Store(
        bucket,
        prefix=prefix or None,
        client_options={
            "allow_http": settings.object_endpoint.startswith("http://"),
            "timeout": f"{settings.object_timeout_s:g}s",
        },
        retry_config={"max_retries": 2},
        **options,  # type: ignore[arg-type]
    )
