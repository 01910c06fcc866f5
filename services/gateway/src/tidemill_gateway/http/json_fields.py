"""Reads fields of a JSON object by their type; a wrong type is an error that names the field, null means absent."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from tidemill_gateway.validation import invalid


class Fields:
    """The fields of one object that nobody has read yet."""

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        self._path = path
        self._left = dict(body)

    def path(self, name: str) -> str:
        """Full name of a field, for messages."""
        return f"{self._path}{name}"

    def take(self, name: str) -> Any:
        """The raw value; None when absent or null."""
        return self._left.pop(name, None)

    def names(self) -> Set[str]:
        """Names that are present and not yet read."""
        return self._left.keys()

    def unknown(self) -> list[str]:
        """Names that nobody asked for."""
        return list(self._left)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise invalid(self.path(name), "must be a string")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(self.path(name), "must be true or false")
        return value

    def integer(self, name: str) -> int | None:
        """A whole number."""
        value = self.take(name)
        return None if value is None else as_integer(self.path(name), value)

    def number(self, name: str) -> float | None:
        """A number."""
        value = self.take(name)
        return None if value is None else as_number(self.path(name), value)

    def object(self, name: str) -> dict[str, Any] | None:
        """A JSON object."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise invalid(self.path(name), "must be an object")
        return value

    def array(self, name: str) -> list[Any] | None:
        """A JSON array."""
        value = self.take(name)
        if value is not None and not isinstance(value, list):
            raise invalid(self.path(name), "must be an array")
        return value

    def objects(self, name: str) -> Iterator["Fields"]:
        """The objects of an array, each with its own path."""
        for i, value in enumerate(self.array(name) or ()):
            path = f"{self.path(name)}[{i}]"
            if not isinstance(value, dict):
                raise invalid(path, "must be an object")
            yield Fields(value, f"{path}.")


def as_integer(path: str, value: Any) -> int:
    """The value if it is a whole number, as JSON writers may spell it (5 or 5.0)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise invalid(path, "must be an integer")
    return int(value)


def as_number(path: str, value: Any) -> float:
    """The value if it is a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(path, "must be a number")
    return float(value)


def as_integers(path: str, values: list[Any]) -> list[int]:
    """Token ids."""
    if all(type(value) is int for value in values):
        return values
    return [as_integer(f"{path}[{i}]", value) for i, value in enumerate(values)]
