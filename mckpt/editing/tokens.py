"""Tokenizers of Hugging Face, for the edit of the vocabulary: the numbers of their tokens, the
pieces of a token in another tokenizer, and the numbers of special tokens in configs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from mckpt.errors import MissingExtra, UsageError
from mckpt.formats.hf_config import FAST_TOKENIZER, GENERATION
from mckpt.storage.files import read_json

_MAX_BYTES = 1 << 28  # of a tokenizer.json; those of 256,000 tokens have 34 MB
_SPECIAL = re.compile(r".*token_(id|index)")  # keys of configs
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# how the tokens of a tokenizer write bytes: each as a letter, or a space as a low line
LETTERS, SPACES, PLAIN = "ByteLevel", "Metaspace", ""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer.json of a directory."""

    directory: Path

    @cached_property
    def _content(self) -> dict[str, Any]:
        content = read_json(self.directory / FAST_TOKENIZER, _MAX_BYTES)
        if not isinstance(content, dict):
            raise UsageError(f"{self.directory / FAST_TOKENIZER}: is not a tokenizer")
        return content

    @cached_property
    def added(self) -> dict[str, int]:
        """Returns the tokens that are texts as they are, such as special ones."""
        return {t["content"]: t["id"] for t in self._content.get("added_tokens") or ()}

    @cached_property
    def ids(self) -> dict[str, int]:
        """Returns the number of each token."""
        found = (self._content.get("model") or {}).get("vocab") or {}
        if not isinstance(found, dict):  # of Unigram: pairs of a token and its score
            found = {pair[0]: number for number, pair in enumerate(found)}
        return {**self.added, **found}

    @property
    def last(self) -> int:
        """Returns the largest number of a token, -1 without tokens."""
        return max(self.ids.values(), default=-1)

    @cached_property
    def writes(self) -> str:
        """Returns LETTERS, SPACES or PLAIN."""
        parts = [self._content.get("pre_tokenizer"), self._content.get("decoder")]
        while parts:
            part = parts.pop() or {}
            if part.get("type") in (LETTERS, SPACES):
                return str(part["type"])
            if part.get("type") == "Replace" and part.get("pattern") == {"String": "\u2581"}:
                return SPACES
            parts += [*part.get("pretokenizers", ()), *part.get("decoders", ())]
        return PLAIN

    def bytes_of(self, token: str) -> bytes:
        """Returns the bytes of the text that a token stands for."""
        if token in self.added or self.writes == PLAIN:
            return token.encode()
        if self.writes == LETTERS:
            letters = _letters()
            return bytes(letters[one] for one in token if one in letters)
        if found := _BYTE.fullmatch(token):
            return bytes([int(found[1], 16)])
        return token.replace("\u2581", " ").encode()

    def same_as(self, other: Tokenizer) -> Iterator[tuple[int, int]]:
        """Yields the number of each token of this tokenizer that the other has, and its number
        there. Tokens are the same that stand for the same text.
        """
        if self.writes == other.writes or PLAIN in (self.writes, other.writes):
            yield from ((new, other.ids[t]) for t, new in self.ids.items() if t in other.ids)
            return
        theirs: dict[bytes, int] = {}
        for token, number in other.ids.items():
            theirs.setdefault(other.bytes_of(token), number)
        for token, number in self.ids.items():
            if (text := self.bytes_of(token)) in theirs:
                yield number, theirs[text]

    def pieces(self, tokens: Iterable[str], of: Tokenizer) -> Iterator[tuple[int, ...]]:
        """Yields the numbers of the pieces into which this tokenizer splits each of the tokens of
        another one. It yields no number for a token that is not a text, such as half of a letter.
        """
        try:
            from tokenizers import Tokenizer as Splitter
        except ImportError:
            raise MissingExtra(
                "vocab: init subword needs the package tokenizers, which is not installed here:"
                " pip install tokenizers"
            ) from None
        splitter = Splitter.from_file(str(self.directory / FAST_TOKENIZER))
        texts = list[str]()
        for token in tokens:
            try:
                texts.append(of.bytes_of(token).decode())
            except UnicodeDecodeError:
                texts.append("")
        for found in splitter.encode_batch(texts, add_special_tokens=False):
            yield tuple(found.ids)

    @cached_property
    def special(self) -> dict[str, Any]:
        """Returns the numbers of special tokens, such as `eos_token_id`, that the files beside the
        tokenizer state.
        """
        found: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json", GENERATION):
            path = self.directory / name
            for key, value in read_json(path, _MAX_BYTES).items() if path.is_file() else ():
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str) and key.endswith("_token") and text in self.ids:
                    found[f"{key}_id"] = self.ids[text]
                elif _SPECIAL.fullmatch(key) and value is not None:
                    found[key] = value
        return found


@lru_cache
def _letters() -> dict[str, int]:
    """Returns the byte for which each letter stands in tokens of byte-level BPE (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [n for n in range(256) if n not in shown]
    return {chr(n): n for n in shown} | {chr(256 + i): n for i, n in enumerate(hidden)}


def restated(
    name: str,
    config: Mapping[str, Any],
    place: Callable[[int], int | None],
    stated: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns a config.json or generation_config.json whose numbers of special tokens are those of
    the new vocabulary.

    place: the new number of an old one, None if its row is left out. stated: numbers that the files
    of the new tokenizer have.

    Raises UsageError for a special token whose row is left out.
    """
    out = copy.deepcopy(dict(config))
    for key, value in config.items():
        if isinstance(value, Mapping):
            out[key] = restated(f"{name}: {key}", value, place, stated)
        several = isinstance(value, list)
        numbers = value if several else [value]
        if not _SPECIAL.fullmatch(key) or not all(type(n) is int for n in numbers):
            continue
        found = [place(n) for n in numbers]
        if key in stated and (None in found or not several or isinstance(stated[key], list)):
            out[key] = stated[key]
            continue
        if None in found:
            lost = numbers[found.index(None)]
            raise UsageError(
                f"vocab: {name} has {key} {lost}, and this token is left out; keep it, or give a"
                f" tokenizer whose {GENERATION} has {key}"
            )
        out[key] = found if several else found[0]
    return out
