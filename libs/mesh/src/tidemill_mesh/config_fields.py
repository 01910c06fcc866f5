"""One settings field: its type, range and help text, and how a text or TOML value becomes its value."""

import ast
import dataclasses
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")
MAX_SECRET_FILE_BYTES = 64 * 1024


class SettingError(Exception):
    """A setting that cannot be used; the message names it and what is allowed."""


@dataclass(frozen=True)
class SettingField:
    """A settings field as the loader, the help text and the checks see it."""

    name: str
    kind: type
    item_kind: type
    default: Any
    help: str
    minimum: float | None
    maximum: float | None
    choices: tuple[Any, ...]
    secret: bool

    @property
    def flag(self) -> str:
        """Its command line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        if self.choices:
            return "one of " + ", ".join(str(choice) for choice in self.choices)
        words = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}[self.item_kind]
        if self.kind is tuple:
            words = f"a list; each item {words}"
        if self.minimum is not None and self.maximum is not None:
            return f"{words} from {self.minimum:g} to {self.maximum:g}"
        if self.minimum is not None:
            return f"{words} of at least {self.minimum:g}"
        return words if self.maximum is None else f"{words} of at most {self.maximum:g}"

    def parse(self, value: Any) -> Any:
        """The checked value of a flag's, variable's or TOML key's value; SettingError if it is not allowed."""
        if self.kind is not tuple:
            return self._parse_item(value)
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, list | tuple):
            raise self._wrong(value)
        return tuple(self._parse_item(item) for item in value)

    def _parse_item(self, value: Any) -> Any:
        try:
            result = CONVERT[self.item_kind](value)
        except ValueError:
            raise self._wrong(value) from None
        if self.secret:
            result = self._read_secret(result)
        if self.choices and result not in self.choices:
            raise self._wrong(value)
        below = self.minimum is not None and result < self.minimum
        if below or (self.maximum is not None and result > self.maximum):
            raise self._wrong(value)
        return result

    def _wrong(self, value: Any) -> SettingError:
        shown = "the given value" if self.secret else repr(value)
        return SettingError(f"{self.name}: {shown} is not allowed; must be {self.allowed}")

    def _read_secret(self, value: str) -> str:
        if not value.startswith("@"):
            return value
        try:
            with Path(value[1:]).open("rb") as file:
                content = file.read(MAX_SECRET_FILE_BYTES + 1)
            if len(content) > MAX_SECRET_FILE_BYTES:
                raise SettingError(f"{self.name}: {value[1:]} is larger than {MAX_SECRET_FILE_BYTES} bytes")
            return content.decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"{self.name}: cannot read {value[1:]}: {type(error).__name__}") from None


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in TRUE_WORDS + FALSE_WORDS:
        return value.lower() in TRUE_WORDS
    raise ValueError


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _to_str(value: Any) -> str:
    if not isinstance(value, str) or "\x00" in value:
        raise ValueError
    return value


CONVERT: dict[type, Callable[[Any], Any]] = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}


def describe_fields(cls: type) -> tuple[SettingField, ...]:
    """The fields of a settings class in the order of their definition."""
    hints, help_texts = typing.get_type_hints(cls), _field_docstrings(cls)
    fields = []
    for item in dataclasses.fields(cls):
        kind, item_kind = _kinds(item.name, hints[item.name])
        assert item.default is not dataclasses.MISSING, f"setting {item.name} needs a default"
        assert help_texts.get(item.name), f"setting {item.name} needs a docstring under it"
        secret = bool(item.metadata.get("secret"))
        looks_secret = item.name.endswith(("_secret", "_password"))
        assert secret or not looks_secret, f"setting {item.name} must be declared with setting(..., secret=True)"
        fields.append(
            SettingField(
                name=item.name,
                kind=kind,
                item_kind=item_kind,
                default=item.default,
                help=help_texts[item.name],
                minimum=item.metadata.get("minimum"),
                maximum=item.metadata.get("maximum"),
                choices=tuple(item.metadata.get("choices") or ()),
                secret=secret,
            )
        )
    return tuple(fields)


def _kinds(name: str, hint: Any) -> tuple[type, type]:
    origin = typing.get_origin(hint)
    if origin is tuple:
        return tuple, typing.get_args(hint)[0]
    if origin is typing.Literal:
        hint = type(typing.get_args(hint)[0])
    assert not isinstance(hint, types.UnionType), f"setting {name} cannot be optional: choose an empty value"
    assert hint in (bool, int, float, str), f"setting {name} has a type the loader does not know: {hint}"
    return hint, hint


def _field_docstrings(cls: type) -> dict[str, str]:
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            texts.update(_docstrings_of(ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]))
    return texts


def _docstrings_of(node: ast.stmt) -> dict[str, str]:
    assert isinstance(node, ast.ClassDef), "settings are classes"
    texts: dict[str, str] = {}
    for statement, following in _pairs(node.body):
        is_field = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if is_field and is_text:
            texts[statement.target.id] = inspect.cleandoc(str(following.value.value))  # type: ignore[attr-defined]
    return texts


def _pairs(body: Sequence[ast.stmt]) -> list[tuple[ast.stmt, ast.stmt]]:
    return list(itertools.pairwise(body))
