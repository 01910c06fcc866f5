"""Where settings come from: flags, environment variables and a TOML file. Each gives {name: (raw value, source)}."""

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from tidemill_mesh.config_fields import SettingError, SettingField

SERVICES = ("gateway", "router", "prefill", "decode", "kvstore", "autoscaler")

RawSettings = dict[str, tuple[Any, str]]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(message)


def service_version(service: str) -> str:
    """Version of a service's distribution; "unknown" when it is not installed."""
    try:
        return metadata.version(f"tidemill-{service}")
    except metadata.PackageNotFoundError:
        return "unknown"


def from_flags(service: str, fields: Sequence[SettingField], argv: Sequence[str]) -> tuple[RawSettings, str]:
    """Settings given as flags, and the file named by --config."""
    parser = _Parser(
        prog=f"tidemill-{service}",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Defaults < TOML file (--config) < environment "
        f"({_prefix(service)}<FIELD>) < flags.\nSecrets may be given as @FILE.",
    )
    parser.add_argument("--version", action="version", version=f"tidemill-{service} {service_version(service)}")
    parser.add_argument("--config", default="", metavar="FILE", help=f"TOML file; table [{service}] or top level")
    for item in fields:
        bare = "true" if item.kind is bool else None
        parser.add_argument(
            item.flag,
            dest=item.name,
            default=None,
            nargs="?" if bare else None,
            const=bare,
            metavar=item.kind.__name__.upper(),
            help=_help(item).replace("%", "%%"),
        )
    given = vars(parser.parse_args(list(argv)))
    config = str(given.pop("config"))
    return {name: (value, item_flag(name)) for name, value in given.items() if value is not None}, config


def item_flag(name: str) -> str:
    """The flag of a setting's name."""
    return "--" + name.replace("_", "-")


def _help(item: SettingField) -> str:
    default = "none" if item.secret or item.default in ("", ()) else item.default
    return f"{item.help} [{item.allowed}; default {default}]"


def _prefix(service: str) -> str:
    return f"TIDEMILL_{service.upper()}_"


def from_environment(service: str, fields: Sequence[SettingField], env: Mapping[str, str]) -> tuple[RawSettings, str]:
    """Settings given as TIDEMILL_<SERVICE>_<FIELD>, and the file named by TIDEMILL_<SERVICE>_CONFIG."""
    prefix = _prefix(service)
    names = {prefix + item.name.upper(): item.name for item in fields}
    unknown = sorted(key for key in env if key.startswith(prefix) and key not in names and key != prefix + "CONFIG")
    if unknown:
        raise SettingError(f"unknown environment variable {', '.join(unknown)}: no such setting")
    raw: RawSettings = {name: (env[key], key) for key, name in names.items() if key in env}
    return raw, env.get(prefix + "CONFIG", "")


def from_toml(path: str, service: str, fields: Sequence[SettingField]) -> RawSettings:
    """Settings of a TOML file: its top level, then the service's own table; other services' tables are theirs."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"config: cannot read {path}: {error}") from None
    own = document.pop(service, {})
    if not isinstance(own, dict):
        raise SettingError(f"{path}: {service} must be a table")
    top = {key: value for key, value in document.items() if not (key in SERVICES and isinstance(value, dict))}
    known = {item.name for item in fields}
    unknown = sorted(key for key in {**top, **own} if key not in known)
    if unknown:
        raise SettingError(f"{path}: unknown key {', '.join(unknown)}: no such setting of {service}")
    return {key: (value, path) for key, value in {**top, **own}.items()}
