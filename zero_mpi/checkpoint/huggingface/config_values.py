"""The values of a config.json, each read as what it must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_mpi.errors import FileError
from zero_mpi.files.foreign import quoted


class Settings:
    """The values of a config.json, read with their limits; errors name the setting."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def fault(self, name: str, expected: str) -> FileError:
        """The error for a setting that is not as expected."""
        found = quoted(self.values[name]) if name in self.values else "nothing"
        return FileError(f"{name}: expected {expected}, found {found}")

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; `default` where it is absent or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
            raise self.fault(name, "a number above 0")
        return float(value)

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 to 2^31; `default` where it is absent or null."""
        value = self.number(name, default)
        if value != int(value) or value >= 1 << 31:
            raise self.fault(name, "a whole number below 2^31")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false; `default` where it is absent or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def only(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """FileError for the first setting that asks for something else than what is computed."""
        for name, values in allowed.items():
            if self.values.get(name) not in values:
                raise self.fault(name, f"{' or '.join(str(value) for value in values[1:]) or 'none'} (only)")
