"""The keys of a Hugging Face `config.json`, read one by one: a wrong one is a sentence that names it (no jax)."""

from collections.abc import Mapping
from typing import Any

from podway.errors import UserError

Config = Mapping[str, Any]
ConfigKeys = dict[str, Any]


class Keys:
    """A config.json with the defaults of its architecture; every read says which key was wrong."""

    def __init__(self, config: Config, defaults: Config) -> None:
        self.config = config
        self.defaults = defaults

    def get(self, key: str) -> Any:
        if key in self.config:
            return self.config[key]
        return self.defaults.get(key)

    def whole(self, key: str) -> int:
        value = self.get(key)
        most = 10_000 if key == "num_hidden_layers" else 2**40
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < most:
            raise self._wrong(key, value, f"a whole number between 1 and {most - 1}")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def part(self, key: str) -> Config:
        """A nested object; nothing or null is an empty one."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return value or {}

    def _wrong(self, key: str, value: object, want: str) -> UserError:
        if key not in self.config and value is None:
            return UserError(f"config.json: {key!r} is missing", f"it must be {want}")
        return UserError(f"config.json: {key!r} is {value!r}", f"it must be {want}")
