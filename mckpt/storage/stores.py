"""Object stores: names, sizes, ranged reads, uploads and removals below one URL.

s3://, gs:// and az:// go through obstore, which finds the credentials of the user itself; mckpt
neither reads nor prints any.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from mckpt.errors import MissingExtra, SourceError, StorageError, UsageError
from mckpt.storage.addresses import OBSTORE, Url, without_queries

T = TypeVar("T")

# Without credentials, the libraries ask the machine's cloud for them, at these addresses.
_NO_CREDENTIALS = re.compile(
    r"(?i)credential|169\.254|latest/api/token|metadata\.google|metadata/identity"
)
# These errors of a listing mean that the bucket is missing: a prefix without objects gives an empty
# listing.
_NO_BUCKET = re.compile(
    r"NoSuchBucket|ContainerNotFound|bucket does not exist|list request:.* 404 Not Found"
)
# bytes of one part of an upload: the smallest that S3 takes, which takes at most 10,000 parts
PART = 5 << 20
PARTS = 8000
UPLOADS = 4  # parts of one file that are sent at the same time
WAITS = (1.0, 4.0)  # seconds before each further try; the libraries repeat a request themselves too
RETRIES = {  # of one request by obstore: about a minute
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=90),
    "backoff": {
        "init_backoff": timedelta(milliseconds=200),
        "max_backoff": timedelta(seconds=15),
        "base": 2,
    },
}


class Object(NamedTuple):
    """An object, as a listing describes it."""

    size: int  # bytes
    version: str  # changes with the content: an ETag, mostly; "" if the store has none
    changed: int  # ns since 1970; 0 if the store does not report it

    @property
    def time(self) -> int:
        """Returns a time in ns that differs between versions: stores report whole seconds."""
        return self.changed // 10**9 * 10**9 + zlib.crc32(self.version.encode()) % 10**9


class Store(Protocol):
    """The objects below a URL. Names are relative to it.

    Methods raise SourceError for an object or a bucket that is not there, or an object that has
    changed; StorageError if the store refuses or cannot be reached.
    """

    def list(self) -> dict[str, Object]: ...

    def read(self, name: str, at: int, nbytes: int, version: str = "") -> Any:
        """Returns a buffer of the bytes from `at` on; fewer at the end of the object.

        version: raise SourceError if the object has another one now.
        """

    def write(self, name: str, data: bytes | Path) -> str:
        """Creates or replaces an object; readers see it when it is complete. Returns its version,
        "" if the store reports none.
        """

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects; those that are not there are ignored."""


class ReadOnly:
    """The methods of a store that is only read."""

    refusal: str  # of a write

    def write(self, name: str, data: bytes | Path) -> str:
        raise UsageError(self.refusal)

    def remove(self, names: Iterable[str]) -> None:
        raise UsageError(self.refusal)


def open_store(url: Url) -> Store:
    """Returns the store of a URL, with credentials that its library finds.

    Raises MissingExtra if that library is not installed, and UsageError for another scheme.
    """
    if url.scheme not in OBSTORE:
        known = ", ".join(f"{scheme}://" for scheme in OBSTORE)
        raise UsageError(
            f"{url}: mckpt opens URLs of {known} or hf://, and not of {url.scheme}://; copy the"
            " files to a directory, or mount the store"
        )
    return _Obstore(url)


# ----------------------------------------------------------------------------------------- obstore


class _Obstore:
    """A store behind the library obstore."""

    def __init__(self, url: Url) -> None:
        try:
            import obstore
        except ImportError:
            raise MissingExtra(
                f"{url}: {url.scheme}:// needs obstore, which is not installed here: pip install"
                " 'mckpt[stores]'"
            ) from None
        self.url, self.lib = url, obstore
        bucket, _, self.prefix = url.path.partition("/")
        kind = OBSTORE[url.scheme]
        make = getattr(obstore.store, f"{kind}Store")
        where = {"container_name" if kind == "Azure" else "bucket": bucket}
        if url.scheme in ("abfs", "abfss") and "@" in bucket:
            container, _, host = bucket.partition("@")
            where = {"container_name": container, "account_name": host.split(".")[0]}
        given = _s3_options() if kind == "S3" else {}
        # This matters for an address that the user gives as http://; the clouds' own are https.
        client = {"allow_http": True, "timeout": "120s", "connect_timeout": "20s"}
        self.store = _retried(
            url, lambda: make(**where, **given, client_options=client, retry_config=RETRIES)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return open_store, (self.url,)  # with the credentials of the process that unpickles it

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def list(self) -> dict[str, Object]:
        prefix = f"{self.prefix}/" if self.prefix else ""

        def listed() -> dict[str, Object]:
            out = {}
            for some in self.lib.list(self.store, prefix or None, chunk_size=1000):
                for one in some:
                    name = one["path"][len(prefix) :]
                    changed = int(one["last_modified"].timestamp() * 1e9)
                    out[name] = Object(one["size"], one.get("e_tag") or "", changed)
            return out

        return _retried(self.url, listed)

    def read(self, name: str, at: int, nbytes: int, version: str = "") -> Any:
        options: dict[str, Any] = {"range": (at, at + nbytes)}
        if version:
            options["if_match"] = version
        key = self._key(name)
        return _retried(
            f"{self.url}/{name}",
            lambda: self.lib.get(self.store, key, options=options).bytes() if nbytes else b"",
        )

    def write(self, name: str, data: bytes | Path) -> str:
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        part = max(PART, -(-size // PARTS))
        put = _retried(
            f"{self.url}/{name}",
            lambda: self.lib.put(
                self.store,
                self._key(name),
                data,
                use_multipart=size > part,
                chunk_size=part,
                max_concurrency=UPLOADS,
            ),
        )
        return put["e_tag"] or ""

    def remove(self, names: Iterable[str]) -> None:
        keys = [self._key(name) for name in names]
        if keys:
            _retried(self.url, lambda: _absent_is_fine(lambda: self.lib.delete(self.store, keys)))


def _s3_options() -> dict[str, Any]:
    """Returns options that obstore does not find itself: the region and the credentials of boto3,
    which reads the user's profiles, if the environment has no keys and boto3 is installed.
    """
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE"):
        return {}
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return {}
    session = boto3.Session()
    if session.get_credentials() is None:
        return {}
    region = {"region": session.region_name} if session.region_name else {}
    return {"credential_provider": Boto3CredentialProvider(session), **region}


def _absent_is_fine(call: Callable[[], Any]) -> None:
    try:
        call()
    except FileNotFoundError:
        pass
    except Exception as error:
        if type(error).__name__ != "NotFoundError":
            raise


# ------------------------------------------------------------------------------- errors and retries


def _retried(place: object, call: Callable[[], T]) -> T:
    """Calls a function of a library. Failures that may pass are tried again after WAITS; others
    become errors of mckpt, with the place and the cure.
    """
    for tries, wait in enumerate((*WAITS, None), 1):
        try:
            return call()
        except Exception as error:
            if wait is None or not _may_pass(error):
                _raise(str(place), error, tries)
            time.sleep(wait)
    raise AssertionError


def _kind(error: Exception) -> str:
    """Returns which kind of failure this is: bucket, absent, refused, changed, or ""."""
    name, text = type(error).__name__, str(error)
    if _NO_BUCKET.search(text):
        return "bucket"
    if isinstance(error, FileNotFoundError) or name == "NotFoundError":
        return "absent"
    if (
        isinstance(error, PermissionError)
        or name in ("PermissionDeniedError", "UnauthenticatedError", "NoCredentialsError")
        or re.search("status code: (401|403) ", text)
    ):
        return "refused"
    return "changed" if name == "PreconditionError" else ""


def _may_pass(error: Exception) -> bool:
    """Returns whether the same call may succeed later: the network, a busy server, a body that
    ended early. An error that obstore itself has retried is not tried again.
    """
    text = str(error)
    repeated = re.search(r"after [1-9]\d* retries", text)
    final = _kind(error) or _NO_CREDENTIALS.search(text) or repeated
    transport = type(error).__module__.partition(".")[0] in ("obstore", "botocore")
    return not final and (transport or isinstance(error, (OSError, TimeoutError)))


def _raise(place: str, error: Exception, tries: int) -> NoReturn:
    why = _first_line(error)
    kind = _kind(error)
    if kind == "bucket":
        bucket = "/".join(place.split("/")[:3])
        raise SourceError(
            f"{place}: the bucket {bucket} does not exist; correct its name, or create it with the"
            " store's own tools: mckpt creates none"
        ) from None
    if kind == "absent":
        raise SourceError(f"{place}: is not there: {why}") from None
    if kind == "changed":
        raise SourceError(
            f"{place}: was changed while it was read; run the command again when nothing writes"
            " there"
        ) from None
    if kind == "refused":
        raise StorageError(
            f"{place}: the store refused access: {why}; check the credentials that its own tools"
            " use (for s3, `aws s3 ls` shows whether they work), and their permissions"
        ) from None
    if _NO_CREDENTIALS.search(str(error)):
        raise StorageError(
            f"{place}: no credentials were found: {why}; set them as the store's own tools take"
            " them: environment variables or a profile"
        ) from None
    if not isinstance(error, OSError) and type(error).__module__.startswith("builtins"):
        raise error
    what = "answered with an error" if "status code: " in str(error) else "gave no answer"
    raise StorageError(
        f"{place}: the store {what} (tries: {tries}): {why}. The same command continues where it"
        " stopped"
    ) from None


def _first_line(error: Exception) -> str:
    """Returns the first line of a library's message, without queries of URLs. For an answer in XML
    or HTML, it contains the code and the message of the answer.
    """
    text = re.sub(r"\s+Debug source:.*", "", str(error).strip(), flags=re.DOTALL)
    text, *markup = re.split(r"\s*(?=<[?!]?[A-Za-z])", text, maxsplit=1)
    parts = re.findall("<(?:Code|Message)>([^<]*)<", "".join(markup))
    text = " ".join([text, ": ".join(parts)]).strip().split("\n")[0] or type(error).__name__
    return without_queries(text).rstrip(". ")[:300]
