"""A server on loopback that speaks the HTTP API of the Hugging Face Hub, as far as huggingface_hub
2.4 uses it for models: info, tree, resolve with redirects to a second host, the upload of large
files by git-lfs's protocol, commits, branches. It can fail in all the ways that a test wants.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_this_is_the_token_of_the_tests"
SIGNATURE = "Signature=secret"
LARGE = 100_000  # bytes from which a file is stored as a large one
PART = 150_000  # bytes of a part of an upload in several parts

Tree = dict[str, bytes]


@dataclass
class Fault:
    """What happens to the next requests that match, instead of an answer."""

    where: str  # a regular expression of "METHOD /path"
    status: int = 0  # an HTTP status; 0: the connection ends in the middle of the body
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


class Hub:
    """The repositories of the server, and what it was asked."""

    def __init__(self) -> None:
        self.branches: dict[str, dict[str, str]] = {}  # repository -> branch -> commit
        self.commits: dict[str, Tree] = {}
        self.large: dict[str, bytes] = {}  # sha256 -> content of uploaded large files
        self.parts: dict[str, dict[int, bytes]] = {}
        self.private: set[str] = set()  # repositories that need the token
        self.gated: set[str] = set()
        self.faults: list[Fault] = []
        self.asked: list[str] = []  # "METHOD /path", with its range
        self.leaks: list[str] = []  # requests that sent the token to the second host
        self.sent: Counter[str] = Counter()  # bytes of each path that were read
        self.multipart = False
        self.url = self.cdn = ""
        self.lock = threading.Lock()

    def commit(self, repo: str, tree: Tree, branch: str = "main") -> str:
        """Makes `tree` the content of a branch; returns the id of the commit."""
        facts = repr((repo, branch, len(self.commits), sorted(tree)))
        self.large |= {sha256(d): d for path, d in tree.items() if is_large(path, len(d))}
        oid = hashlib.sha1(facts.encode()).hexdigest()
        self.commits[oid] = tree
        self.branches.setdefault(repo, {})[branch] = oid
        return oid

    def add(self, repo: str, folder: Path, branch: str = "main") -> str:
        """Puts the files of a folder into a branch."""
        tree = {
            p.relative_to(folder).as_posix(): p.read_bytes()
            for p in folder.rglob("*")
            if p.is_file()
        }
        return self.commit(repo, tree, branch)

    def tree(self, repo: str, branch: str = "main") -> Tree:
        return self.commits[self.branches[repo][branch]]

    def find(self, repo: str, revision: str) -> str | None:
        """Returns the commit of a revision."""
        if revision in self.commits:
            return revision
        return self.branches[repo].get(revision)


def is_large(path: str, size: int) -> bool:
    return size >= LARGE or path.endswith(".safetensors")


@functools.cache
def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.cache
def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    ROUTES: tuple[tuple[str, str, str], ...] = (
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<rev>[^/]+))?", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<rev>[^/]+)", "listing"),
        ("GET|HEAD", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)", "resolve"),
        ("GET|HEAD", r"/cdn/(?P<oid>\w+)", "content"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "valid"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<branch>[^/]+)", "branch"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<rev>[^/]+)", "modes"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/lfs/(?P<oid>\w+)", "put"),
        ("PUT", r"/lfs/(?P<oid>\w+)/(?P<part>\d+)", "put"),
        ("POST", r"/lfs/(?P<oid>\w+)/complete", "complete"),
        ("POST", r"/lfs/(?P<oid>\w+)/verify", "verified"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<rev>[^/]+)", "commit"),
    )

    def log_message(self, *args: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        # else the end of each range may wait for an acknowledgement
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def handle_any(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        request = f"{self.command} {path}"
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = self.headers.get("Authorization")
        cut = False
        with hub.lock:
            hub.asked.append(f"{request} {self.headers.get('Range', '')}".strip())
            if path.startswith(("/cdn/", "/lfs/")) and not path.endswith("verify") and token:
                hub.leaks.append(request)
            for fault in hub.faults:
                if fault.times and re.search(fault.where, request):
                    fault.times -= 1
                    if fault.status:
                        return self.answer(fault.status, headers=fault.headers)
                    cut = True
                    break
        self.cut = cut
        for methods, pattern, name in self.ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in methods.split("|"):
                values = {k: unquote(v) if v else v for k, v in found.groupdict().items()}
                if (repo := values.get("repo")) and not self.admitted(repo, token):
                    return None
                with hub.lock:
                    step = getattr(self, name)(**values)
                return step() if callable(step) else None
        return self.answer(404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def admitted(self, repo: str, token: str | None) -> bool:
        """Answers as the Hub does to those who may not read a repository."""
        hub, known = self.hub, token == f"Bearer {TOKEN}"
        if token and not known:
            message = "Invalid credentials in Authorization header"
            self.answer(401, headers={"X-Error-Message": message})
            return False
        if repo in hub.gated and not known:
            self.answer(401, headers={"X-Error-Code": "GatedRepo"})
            return False
        if repo not in hub.branches or (repo in hub.private and not known):
            status = 404 if known else 401
            self.answer(status, headers={"X-Error-Code": "RepoNotFound"})
            return False
        if self.command in ("POST", "PUT") and not known:
            self.answer(403, headers={"X-Error-Message": "you may not write here"})
            return False
        return True

    def answer(
        self,
        status: int = 200,
        body: Any = b"",
        headers: dict[str, str] | None = None,
        length: int | None = None,
    ) -> None:
        data = body if isinstance(body, (bytes, memoryview)) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command == "HEAD":
            return
        if getattr(self, "cut", False):
            data = data[: len(data) // 2]
        self.wfile.write(data)
        self.hub.sent[urlsplit(self.path).path] += len(data)
        if getattr(self, "cut", False):
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------------------------- reading

    def revision(self, repo: str, rev: str | None) -> str | None:
        found = self.hub.find(repo, rev or "main")
        if found is None:
            self.answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        return found

    def info(self, repo: str, rev: str | None) -> None:
        if oid := self.revision(repo, rev):
            files = [{"rfilename": path} for path in self.hub.commits[oid]]
            self.answer(body={"id": repo, "sha": oid, "siblings": files, "tags": []})

    def listing(self, repo: str, rev: str) -> None:
        if not (oid := self.revision(repo, rev)):
            return
        out = []
        for path, data in self.hub.commits[oid].items():
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data)}
            if is_large(path, len(data)):
                entry["oid"] = git_oid(sha256(data).encode())
                entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
            else:
                entry["oid"] = git_oid(data)
            out.append(entry)
        self.answer(body=out)

    def resolve(self, repo: str, rev: str, path: str) -> Any:
        if not (oid := self.revision(repo, rev)):
            return None
        headers = {"X-Repo-Commit": oid}
        data = self.hub.commits[oid].get(path)
        if data is None:
            return self.answer(404, headers={**headers, "X-Error-Code": "EntryNotFound"})
        if not is_large(path, len(data)):
            return self.ranged(data, {**headers, "ETag": f'"{git_oid(data)}"'})
        return self.answer(
            302,
            headers={
                **headers,
                "X-Linked-Size": str(len(data)),
                "X-Linked-ETag": f'"{sha256(data)}"',
                "Location": f"{self.hub.cdn}/cdn/{sha256(data)}?{SIGNATURE}",
            },
        )

    def content(self, oid: str) -> Any:
        if SIGNATURE not in self.path:
            return self.answer(403)
        return self.ranged(self.hub.large[oid], {"ETag": f'"{oid}"'})

    def ranged(self, data: bytes, headers: dict[str, str]) -> Any:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status, whole, part = 200, len(data), memoryview(data)
        if asked:
            start, end = int(asked[1]), min(int(asked[2] or whole - 1), whole - 1)
            status, part = 206, part[start : end + 1]
            headers["Content-Range"] = f"bytes {start}-{end}/{whole}"
        # outside of the lock, so that others are answered meanwhile
        return lambda: self.answer(status, part, headers, length=len(part))

    # ------------------------------------------------------------------------------------- writing

    def json(self) -> Any:
        return json.loads(self.body)

    def create(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, headers={"X-Error-Message": "Invalid username or password."})
        asked = self.json()
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.hub.branches:
            return self.answer(409, {"url": f"{self.hub.url}/{repo}"})
        self.hub.commit(repo, {".gitattributes": b"*.safetensors filter=lfs\n"})
        if asked.get("visibility") == "private" or asked.get("private"):
            self.hub.private.add(repo)
        return self.answer(body={"url": f"{self.hub.url}/{repo}"})

    def valid(self) -> None:
        self.answer(body={"errors": [], "warnings": []})

    def branch(self, repo: str, branch: str) -> None:
        if branch in self.hub.branches[repo]:
            return self.answer(409)
        self.hub.branches[repo][branch] = self.hub.branches[repo]["main"]
        return self.answer(body={})

    def modes(self, repo: str, rev: str) -> None:
        if not (at := self.revision(repo, rev)):
            return
        tree, out = self.hub.commits[at], []
        for file in self.json()["files"]:
            large = is_large(file["path"], file["size"])
            there = tree.get(file["path"])
            oid = None if there is None else sha256(there) if large else git_oid(there)
            mode = "lfs" if large else "regular"
            entry = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}
            out.append(entry)
        self.answer(body={"files": out})

    def batch(self, repo: str) -> None:
        out = []
        for one in self.json()["objects"]:
            oid, size = one["oid"], one["size"]
            entry: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.hub.large:
                at = f"{self.hub.cdn}/lfs/{oid}"
                upload: dict[str, Any] = {"href": f"{at}?{SIGNATURE}"}
                if self.hub.multipart and size > PART:
                    parts = range(1, -(-size // PART) + 1)
                    upload["href"] = f"{at}/complete?{SIGNATURE}"
                    upload["header"] = {"chunk_size": str(PART)} | {
                        str(n): f"{at}/{n}?{SIGNATURE}" for n in parts
                    }
                entry["actions"] = {
                    "upload": upload,
                    "verify": {"href": f"{self.hub.url}/lfs/{oid}/verify"},
                }
            out.append(entry)
        self.answer(body={"objects": out, "transfer": "basic"})

    def put(self, oid: str, part: str = "") -> None:
        if part:
            self.hub.parts.setdefault(oid, {})[int(part)] = self.body
        else:
            assert sha256(self.body) == oid
            self.hub.large[oid] = self.body
        self.answer(headers={"ETag": f'"{part or oid}"'})

    def complete(self, oid: str) -> None:
        parts = self.hub.parts[oid]
        data = b"".join(parts[one["partNumber"]] for one in self.json()["parts"])
        assert sha256(data) == oid
        self.hub.large[oid] = data
        self.answer(body={})

    def verified(self, oid: str) -> None:
        self.answer(200 if oid in self.hub.large else 404)

    def commit(self, repo: str, rev: str) -> None:
        tree = dict(self.hub.tree(repo, rev))
        for line in self.body.splitlines():
            kind, value = (one := json.loads(line))["key"], one["value"]
            if kind == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                tree[value["path"]] = self.hub.large[value["oid"]]
            elif kind == "deletedFile":
                del tree[value["path"]]
        oid = self.hub.commit(repo, tree, rev)
        self.answer(body={"commitUrl": f"{self.hub.url}/{repo}/commit/{oid}", "commitOid": oid})


@contextmanager
def serving() -> Iterator[Hub]:
    """Starts the server; its files are under another host name than its API."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.cdn = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
