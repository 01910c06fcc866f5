"""Typed settings of every service: frozen dataclasses, one loader, defaults < TOML < environment < flags."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from tidemill_mesh.config_fields import SettingError, SettingField, describe_fields
from tidemill_mesh.config_sources import from_environment, from_flags, from_toml

CONFIG_VERSION = 1
_URL_CREDENTIALS = re.compile(r"//[^/@,]*@")

T = TypeVar("T", bound="ServiceSettings")


def setting(
    default: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[Any] | None = None,
    secret: bool = False,
) -> Any:
    """A settings field with its allowed range; a secret is never printed and may be given as "@file"."""
    metadata = {"minimum": minimum, "maximum": maximum, "choices": choices, "secret": secret}
    if isinstance(default, list | dict | set):
        raise AssertionError("a setting's default must be immutable: use a tuple")
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """What every service process can be told."""

    config_version: int = setting(CONFIG_VERSION, choices=(CONFIG_VERSION,))
    """Version of the configuration keys that the file or environment was written for."""
    mesh: str = "default"
    """Name of the mesh; processes of different meshes share etcd and NATS without seeing each other."""
    instance: str = ""
    """Id of this instance, of a-z, 0-9 and "-"; empty: "<service>-" and six random hex digits."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    advertise_host: str = ""
    """Host name or address at which peers reach this process; empty: host, or the machine's name for a wildcard."""
    port: int = setting(0, minimum=0, maximum=65535)
    """gRPC port; 0: any free one."""
    stream_port: int = setting(0, minimum=0, maximum=65535)
    """Port of the long-lived gRPC streams that a router or worker offers gateways; 0: any free one."""
    http_port: int = setting(0, minimum=0, maximum=65535)
    """Port of /metrics, /health and /ready; 0: any free one."""
    etcd: str = "127.0.0.1:2379"
    """etcd endpoints, host:port, comma separated."""
    etcd_user: str = ""
    """etcd user; empty: no authentication."""
    etcd_password: str = setting("", secret=True)
    """Password of etcd_user."""
    nats: str = "nats://127.0.0.1:4222"
    """NATS servers, comma separated."""
    nats_user: str = ""
    """NATS user; empty: no authentication."""
    nats_password: str = setting("", secret=True)
    """Password of nats_user."""
    liveness_s: float = setting(3.0, minimum=0.5, maximum=300.0)
    """Seconds after which a silent peer counts as lost; every liveness bound derives from it."""
    drain_s: float = setting(30.0, minimum=0.0, maximum=86400.0)
    """Seconds that running work may take after SIGTERM before it is ended."""
    log_format: str = setting("console", choices=("console", "json"))
    """Form of log lines."""
    log_level: str = setting("info", choices=("debug", "info", "warning", "error"))
    """Least severe level that is logged."""
    insecure: bool = False
    """Allow a bind outside loopback without TLS."""
    tls_cert: str = ""
    """PEM file of this process's certificate chain; set together with tls_key."""
    tls_key: str = ""
    """PEM file of the certificate's private key."""
    tls_ca: str = ""
    """PEM file of the authority that signs peers; set: peers must present a certificate (mutual TLS)."""
    run_dir: str = ""
    """Folder in which <instance>.json (pid and ports) is written; empty: none."""


def public_settings(settings: ServiceSettings) -> dict[str, Any]:
    """Settings as shown in logs: secrets only as set or not set."""
    shown = {}
    for item in describe_fields(type(settings)):
        value = getattr(settings, item.name)
        if isinstance(value, str):
            value = _URL_CREDENTIALS.sub("//(set)@", value)
        shown[item.name] = ("(set)" if value else "") if item.secret else value
    return shown


def load_settings(
    cls: type[T], service: str, argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None
) -> T:
    """Settings of a service; prints the field, its allowed range and exits with 2 on a wrong or unknown value."""
    arguments = sys.argv[1:] if argv is None else argv
    environment = os.environ if env is None else env
    fields = describe_fields(cls)
    try:
        flags, config_file = from_flags(service, fields, arguments)
        variables, config_variable = from_environment(service, fields, environment)
        path = config_file or config_variable
        raw = {**(from_toml(path, service, fields) if path else {}), **variables, **flags}
        return cls(**{name: _checked(_by_name(fields, name), *given) for name, given in raw.items()})
    except SettingError as error:
        _refuse(service, error)


def _by_name(fields: Sequence[SettingField], name: str) -> SettingField:
    return next(item for item in fields if item.name == name)


def _checked(item: SettingField, value: Any, source: str) -> Any:
    try:
        return item.parse(value)
    except SettingError as error:
        raise SettingError(f"{source}: {error}") from None


def _refuse(service: str, error: SettingError) -> NoReturn:
    print(f"tidemill-{service}: {error}", file=sys.stderr)
    raise SystemExit(2)
