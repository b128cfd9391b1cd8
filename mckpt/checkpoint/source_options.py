"""The description of a checkpoint that the user gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mckpt.errors import UsageError


@dataclass(frozen=True)
class SourceOptions:
    """The user's description of a checkpoint.

    For a Megatron checkpoint, `vocab_size` and `settings` replace its args.
    """

    like: str | Path | None = None  # a Hugging Face directory whose config.json describes the model
    family: str | None = None
    mapping: str | None = None  # the user's own family file
    vocab_size: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # dim -> value
    iteration: int | None = None
    # the dims replace those of config.json unchecked, because no tensor is stored yet
    trusted: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.settings, Mapping):
            raise UsageError(f"settings is {self.settings!r}, and must be a dict of dims")
        if self.settings:
            from mckpt.mapping import schema

            for name in self.settings.keys() - schema().dims.keys():
                raise UsageError(
                    f"settings: {name!r} is not the name of a dim;"
                    " `mckpt mappings show logical` lists the dims"
                )
        for name in ("family", "mapping"):
            if not isinstance(value := getattr(self, name), str | None):
                raise UsageError(f"{name} is {value!r}, and must be a text")
        for name, least in (("vocab_size", 1), ("iteration", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise UsageError(f"{name} is {value!r}, and must be a whole number from {least} on")

    @property
    def family_name(self) -> str | None:
        """Returns the family, or the family file, that the user names."""
        return self.mapping or self.family

    @property
    def dims(self) -> dict[str, Any]:
        """Returns the dims that the user gives."""
        return {
            **self.settings,
            **({} if self.vocab_size is None else {"vocab_size": self.vocab_size}),
        }
