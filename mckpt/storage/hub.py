"""The Hugging Face Hub, through huggingface_hub: names of models, downloads into its cache, and
commits. Its token, its endpoint and its cache are those that huggingface_hub finds.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import urlsplit

from mckpt.errors import MckptError, MissingExtra, SourceError, StorageError, UsageError
from mckpt.storage.addresses import HubName, without_queries
from mckpt.version import __version__

if TYPE_CHECKING:
    import logging

T = TypeVar("T")

MAIN = "main"  # the branch of a name without a revision
WAITS = (1, 2, 4)  # seconds before each further try, if the server does not ask for others
LONGEST_WAIT = 300  # seconds
BUSY = (408, 429, 500, 502, 503, 504)  # HTTP status codes after which another try may succeed
EXPIRED = (400, 401, 403, 404, 410)  # HTTP status codes for a redirect address that has expired


# URL of a file -> the address to which the Hub has redirected: signed, and valid for about an hour
_redirected: dict[str, str] = {}


def fetch(name: HubName, patterns: Sequence[str]) -> Path:
    """Returns the snapshot in the cache of huggingface_hub, after it has downloaded the files that
    match: at the top of the repository, and for patterns with a `/` in the directories there.

    Raises MissingExtra without huggingface_hub, UsageError for a name that the Hub cannot have,
    SourceError if there is no such repository or revision, and StorageError if the Hub refuses the
    token, limits the rate, or cannot be reached. Busy servers and lost connections are tried again.
    """
    hub = _library(f"reading {name} from the Hugging Face Hub", name)

    def download(revision: str | None, depth: int) -> str:
        return str(
            hub.snapshot_download(
                name.repo,
                revision=revision,
                # in a pattern of huggingface_hub, `*` also stands for text with `/`
                allow_patterns=[p for p in patterns if p.count("/") == depth],
                ignore_patterns=["*/*" + "/*" * depth],
                library_name="mckpt",
                library_version=__version__,
            )
        )

    found = Path(_retried(name, lambda: download(name.revision, 0)))
    if any("/" in pattern for pattern in patterns):
        _retried(name, lambda: download(found.name, 1))  # of the same commit
    return found


def offline() -> bool:
    """Returns whether HF_HUB_OFFLINE forbids requests."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return False
    return bool(constants.is_offline_mode())


def sizes(name: HubName) -> dict[str, int]:
    """Returns the bytes of each file at the top of a repository, by name; raises as `fetch`."""
    hub = _library(f"reading {name} from the Hugging Face Hub", name)
    api = hub.HfApi(library_name="mckpt", library_version=__version__)

    def listed() -> dict[str, int]:
        tree = api.list_repo_tree(name.repo, revision=name.revision)
        return {file.path: file.size for file in tree if hasattr(file, "size")}

    return _retried(name, listed)


def read_range(name: HubName, file: str, start: int, nbytes: int) -> Any:
    """Returns a buffer of `nbytes` bytes of a file on the Hub from the offset `start`, without the
    cache.

    The result is shorter at the end of the file. The Hub, which limits the rate of requests, is
    asked once for each file: it redirects to another server, which is then asked for the other
    ranges. When that address has expired, the Hub is asked again.

    Raises as `fetch`, and StorageError if the server does not answer with the range.
    """
    hub = _library(f"reading {name} from the Hugging Face Hub", name)
    from huggingface_hub import utils

    url = hub.hf_hub_url(name.repo, file, revision=name.revision)

    def read() -> Any:
        known = _redirected.get(url)
        if known and (data := _read_address(known, start, nbytes)) is not None:
            return data
        headers = utils.build_hf_headers(
            token=False if known else None,  # the token is for the Hub alone
            library_name="mckpt",
            library_version=__version__,
        )
        headers["Range"] = f"bytes={start}-{start + nbytes - 1}"
        headers["Accept-Encoding"] = "identity"
        out = bytearray()
        with utils.http_stream_backoff(
            "GET", known or url, headers=headers, follow_redirects=True
        ) as response:
            if known and response.status_code in EXPIRED:
                _redirected.pop(url, None)
                return read()
            utils.hf_raise_for_status(response)
            if urlsplit(str(response.url)).netloc != urlsplit(url).netloc:
                _redirected[url] = str(response.url)
            if response.status_code != 206 and start:
                raise StorageError(
                    f"{name}: {file}: the server answers a request for a part of the file with HTTP"
                    f" {response.status_code}; a proxy may remove the header Range"
                )
            for block in response.iter_bytes():
                out += block
                if len(out) >= nbytes:
                    break
        return bytes(out[:nbytes])

    return _retried(name, read)


def _read_address(address: str, start: int, nbytes: int) -> Any:
    """Returns a range from an address to which the Hub has redirected. With obstore a conversion
    takes a quarter of the processor time that it takes with huggingface_hub.

    Returns None if obstore is not installed or fails for any reason: huggingface_hub then reads the
    range, with its retries and its errors.
    """
    if (store := _store_of(address)) is None:
        return None
    import obstore

    try:
        return obstore.get(store, "", options={"range": (start, start + nbytes)}).bytes()
    except Exception:  # of any kind: huggingface_hub reads the range, and reports its own error
        return None


@functools.lru_cache(maxsize=1024)  # files
def _store_of(address: str) -> Any:
    """Returns obstore's store of one address, None if obstore is not installed."""
    try:
        from obstore.store import HTTPStore
    except ImportError:
        return None
    plain = address.startswith("http://")
    client: Any = {"allow_http": plain, "timeout": "120s", "connect_timeout": "10s"}
    return HTTPStore.from_url(address, client_options=client, retry_config={"max_retries": 0})


class Commit(NamedTuple):
    """A commit on the Hub that holds an upload."""

    oid: str
    url: str  # of the branch
    new: bool  # False: the branch had exactly these files already
    removed: list[str]  # files that the commit removed


def upload(
    name: HubName,
    files: Mapping[str, Path],
    *,
    stale: Callable[[str], bool],
    private: bool = False,
    message: str,
) -> Commit:
    """Makes one commit of local files, given by their names in the repository; creates the
    repository and the branch if needed. Until the commit, readers see the branch as it was.

    A repeated call sends only large files that the Hub does not have yet.

    stale: returns whether to remove a file of the branch that is not among `files`. Raises the
    errors of `fetch`, and StorageError if the Hub does not list all files with their content
    afterwards.
    """
    hub = _library(f"uploading to {name} on the Hugging Face Hub", None)
    api = hub.HfApi(library_name="mckpt", library_version=__version__)
    branch = name.revision or MAIN
    _retried(name, lambda: api.create_repo(name.repo, private=private or None, exist_ok=True))
    if branch != MAIN:
        _retried(name, lambda: api.create_branch(name.repo, branch=branch, exist_ok=True))
    hashed: dict[str, Any] = {}  # file -> the facts that the first try computes, such as its sha256

    def commit() -> Commit:
        before = api.model_info(name.repo, revision=branch)
        there = [file.rfilename for file in before.siblings or []]
        removed = sorted(path for path in there if path not in files and stale(path))
        additions = [hub.CommitOperationAdd(path, str(file)) for path, file in files.items()]
        for one in additions:
            one.upload_info = hashed.setdefault(one.path_in_repo, one.upload_info)
        deletions = [hub.CommitOperationDelete(path) for path in removed]
        made = api.create_commit(
            name.repo, [*additions, *deletions], commit_message=message, revision=branch
        )
        url = f"{api.endpoint}/{name.repo}/tree/{branch}"
        return Commit(made.oid, url, made.oid != before.sha, removed)

    made = _retried(name, commit)
    listed = _retried(
        name,
        lambda: {
            file.path: file
            for file in api.list_repo_tree(name.repo, recursive=True, revision=made.oid)
        },
    )
    lost = [
        path for path, file in files.items() if not _is(listed.get(path), file, hashed[path].sha256)
    ]
    if lost:
        raise StorageError(
            f"{name}: the commit {made.oid} lacks {', '.join(lost[:8])}, or has another content of"
            " them; a .gitignore in the repository may exclude them"
        )
    return made


def _is(listed: Any, file: Path, digest: bytes) -> bool:
    """Returns whether an entry of the Hub's listing has the content of a local file. The listing
    has the sha256 of a large file, and git's hash of a small one.

    digest: the sha256 of the local file.
    """
    if getattr(listed, "lfs", None) is not None:
        return bool(listed.lfs.sha256 == digest.hex())
    # a directory has no `blob_id`
    if getattr(listed, "blob_id", None) is None or listed.size != file.stat().st_size:
        return False
    data = file.read_bytes()
    return bool(listed.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())


# ------------------------------------------------------------------------------- errors and retries


def _library(doing: str, name: HubName | None) -> ModuleType:
    """Returns huggingface_hub, after it was told to log no queries of URLs and to draw progress
    bars on a terminal only.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import disable_progress_bars
        from huggingface_hub.utils import logging as library_log
    except ImportError as e:
        other = f", or download the model elsewhere: {_download(name)}" if name else ""
        raise MissingExtra(
            f"{doing} needs huggingface_hub, which is not installed here: pip install"
            f" 'mckpt[hub]'{other}"
        ) from e
    import logging

    library_log.get_verbosity()  # makes the handlers, if that did not happen yet
    for handler in logging.getLogger("huggingface_hub").handlers:
        if _quiet not in handler.filters:
            handler.addFilter(_quiet)
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not sys.stderr.isatty():
        disable_progress_bars()
    return huggingface_hub


def _quiet(record: logging.LogRecord) -> bool:
    """Removes the queries of URLs from a line of huggingface_hub's log; drops the line on patterns
    that match no file, because some of ours are alternatives.
    """
    text = record.getMessage()
    record.msg, record.args = without_queries(text), ()
    return not text.startswith("No files matched")


def _download(name: HubName) -> str:
    revision = f" --revision {name.revision}" if name.revision else ""
    folder = name.repo.rpartition("/")[2]
    return f"`hf download {name.repo}{revision} --local-dir {folder}`"


def _retried(name: HubName, call: Callable[[], T]) -> T:
    """Calls a function of huggingface_hub, which already repeats some requests itself. Busy servers
    and lost connections are tried again after WAITS, or after the time that the server asks for.
    """
    for tries, wait in enumerate((*WAITS, None), 1):
        try:
            return call()
        except MckptError:
            raise
        except Exception as error:
            causes = list(_chain(error))
            response = next((r for e in causes if (r := getattr(e, "response", None))), None)
            lost = response is None and any(map(_is_lost_connection, causes))
            busy = response is not None and response.status_code in BUSY
            if wait is None or not (lost or busy):
                _raise(name, error, causes, response, tries)
            asked = response.headers.get("Retry-After", "") if response is not None else ""
            time.sleep(min(int(asked), LONGEST_WAIT) if asked.isdecimal() else wait)
    raise AssertionError


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_lost_connection(error: BaseException) -> bool:
    """Returns whether the network failed: an error of the HTTP library, or a body of another size
    than the server had announced.
    """
    library = type(error).__module__.partition(".")[0]
    transport = library.startswith(("httpx", "httpcore", "requests"))
    offline = type(error).__name__ == "OfflineModeIsEnabled"
    return not offline and (
        transport
        or isinstance(error, (ConnectionError, TimeoutError))
        or "Consistency check failed" in str(error)
    )


def _raise(
    name: HubName,
    error: Exception,
    causes: Sequence[BaseException],
    response: Any,
    tries: int,
) -> NoReturn:
    """Raises the error of mckpt that explains an error of huggingface_hub. An error of another
    kind, such as a full disk, is raised unchanged.
    """
    from huggingface_hub import constants, errors

    def caused(*kinds: type[BaseException]) -> bool:
        return any(isinstance(e, kinds) for e in causes)

    where = constants.ENDPOINT
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    status = None if response is None else response.status_code
    if caused(errors.HFValidationError):
        raise UsageError(f"{name.repo}: cannot be a model's name on the Hub: {error}") from None
    if caused(errors.RevisionNotFoundError):
        raise SourceError(
            f"{name.repo}: has no revision {name.revision or MAIN}; its branches and tags are"
            f" listed at {where}/{name.repo}/tree/{MAIN}"
        ) from None
    if caused(errors.GatedRepoError):
        raise StorageError(
            f"{name.repo}: is gated (HTTP {status}). Accept its conditions at {where}/{name.repo},"
            f" then {log_in}, with a token of the same account"
        ) from None
    if caused(errors.RepositoryNotFoundError):
        raise SourceError(
            f"{name.repo}: does not exist, neither as a directory here nor as a model that you may"
            f" read at {where} (HTTP {status}). Correct the name; if the model is private, {log_in}"
        ) from None
    if status in (401, 403):
        raise StorageError(
            f"{name}: {where} refused access (HTTP {status}): {_first_line(error)}; {log_in}, with"
            " a token that may do this"
        ) from None
    if status == 429:
        raise StorageError(
            f"{name}: {where} accepts no more requests for now (HTTP 429, {tries} tries). Wait some"
            f" minutes and give the same command; if you have not, {log_in}, which raises the limit"
        ) from None
    if caused(errors.OfflineModeIsEnabled):
        raise SourceError(
            f"{name}: does not exist as a directory here, and is not complete in the cache"
            f" {constants.HF_HUB_CACHE}; HF_HUB_OFFLINE forbids downloading it. Unset it, or"
            f" download the model elsewhere: {_download(name)}"
        ) from None
    if status is not None or any(map(_is_lost_connection, causes)):
        last = next((e for e in causes if _is_lost_connection(e)), error)
        reason = f"HTTP {status}" if status is not None else _first_line(last)
        raise StorageError(
            f"{name}: no answer from {where} after {tries} tries: {reason}. The same command"
            " continues with the files that are missing"
        ) from None
    raise error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return without_queries(lines[0]).rstrip(". ")
