"""Decides whether a path from the user is a directory of this machine, a model on the Hugging Face
Hub, or a URL of an object store.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from mckpt.errors import UsageError
from mckpt.lazy import pattern

# org/name[@revision]. With hf:// in front it is never a local directory, and the organisation may
# be missing. pathlib turns hf:// into hf:/.
_NAME = pattern(
    r"(?:(?:(?P<scheme>hf:/{1,2})(?:[A-Za-z0-9][\w.-]*/)?)|[A-Za-z0-9][\w.-]*/)"
    r"[A-Za-z0-9_][\w.-]*(?:@[A-Za-z0-9][\w./+-]*)?"
)
# pathlib turns s3:// into s3:/. hf:// names a model on the Hub.
_URL = pattern(r"(?!hf:)([A-Za-z][A-Za-z0-9+.-]*):/{1,3}(.*)", re.DOTALL)
# the schemes of object stores, with obstore's name of the store
OBSTORE = {"s3": "S3", "s3a": "S3", "gs": "GCS", "az": "Azure", "abfs": "Azure", "abfss": "Azure"}
# A URL's query may carry a signature that grants access.
_QUERY = pattern(r"(https?://[^\s?'\"]+)\?[^\s'\"]+")


class HubName(NamedTuple):
    """A model on the Hub."""

    repo: str  # org/name
    revision: str | None  # a branch, a tag or a commit; None: the branch main

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def hub_name_of(path: str | Path) -> HubName | None:
    """Returns the model on the Hub that a path names, or None if it is a local path.

    A path that exists here is always local. So is a missing `org/name` in an existing directory
    `org`, because it is probably a misspelt path; `hf://org/name` names the model even then.
    """
    text = str(path)
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    if match["scheme"] is None and (Path(text).exists() or Path(text.split("/")[0]).exists()):
        return None
    repo, _, revision = text.removeprefix(match["scheme"] or "").partition("@")
    return HubName(repo, revision or None)


class Url(NamedTuple):
    """A place in an object store."""

    scheme: str
    path: str  # bucket/prefix, without slashes at the ends

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        return Url(self.scheme, self.path.rpartition("/")[0])


def url_of(path: str | Path) -> Url | None:
    """Returns the URL that a path means, None for a path of this machine.

    Raises UsageError for a URL with a query, a user or a password: they would be printed. Also for
    a path with a NUL, which no file system has.
    """
    if "\0" in str(path):
        raise UsageError(f"{str(path)!r}: a path cannot have a NUL character")
    match = _URL.fullmatch(f"{path}/" if str(path)[:-1] in OBSTORE else str(path))  # s3: of s3://
    if match is None:
        return None
    scheme, rest = match[1].lower(), match[2].strip("/")
    first, query = rest.partition("/")[0], re.search(r"[?#]", rest)
    container = scheme in ("abfs", "abfss") and ":" not in first  # container@account
    password = ("@" in first and not container) or re.search(":.*@", rest, re.DOTALL)
    if password or query:
        shown = "" if query and "@" in rest else re.split("[?#]", rest)[0].rpartition("@")[2]
        raise UsageError(
            f"{scheme}://{'...@' if '@' in rest else ''}{shown}: has a user, a password, a query or"
            " a fragment, which mckpt would print"
            " and store. Give the plain URL, and the credentials as the store's own tools take"
            " them: environment variables or a profile"
        )
    if not rest:
        raise UsageError(f"{path}: names no bucket; write {scheme}://BUCKET/PATH")
    return Url(scheme, re.sub("/+", "/", rest))


def without_queries(text: str) -> str:
    """Returns a text without the queries of its URLs, which may contain a signature."""
    return _QUERY.sub(r"\1?...", text)
