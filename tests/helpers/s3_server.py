"""A small S3 server on loopback, in a process of its own: objects are files of a directory.

It knows GET with ranges and If-Match, HEAD, PUT, multipart uploads, ListObjectsV2, DELETE and
DeleteObjects. It looks at no signature. It counts requests, and fails when a test says so. Buckets
whose name begins with `no-such-` do not exist.

    python -m tests.helpers.s3_server DIRECTORY      prints its port

POST /_control {"faults": [...], "reset": true} sets faults; GET /_control returns the log.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass
class Fault:
    """What the server does wrong: with requests of a method whose target matches a pattern."""

    method: str
    pattern: str
    what: str  # an HTTP status, "cut" (the body ends early), "drop" (no answer), "slow" (seconds)
    times: int = 1
    skip: int = 0  # requests that are answered well before
    seconds: float = 0.0


class State:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = threading.Lock()
        self.faults: list[Fault] = []
        self.log: list[str] = []
        self.users: set[str] = set()  # names of the keys with which requests are signed
        self.sent: Counter[str] = Counter()  # bytes of the bodies of answers, by method

    def fault(self, method: str, target: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.method == method and re.search(fault.pattern, target):
                    if fault.skip:
                        fault.skip -= 1
                    elif fault.times:
                        fault.times -= 1
                        return fault
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *args: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.request.setsockopt(6, 1, 1)  # TCP_NODELAY

    def handle_one(self) -> None:
        parts = urlsplit(self.path)
        self.query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        self.key = unquote(parts.path).lstrip("/")
        if self.key == "_control":
            return self.control()
        # the JSON interface of Google's store, by which tensorstore reads
        if found := re.fullmatch(r"storage/v1/b/([^/]+)/o/(.+)", self.key):
            self.key = f"{found[1]}/{found[2]}"
        user = re.search(r"Credential=([^/]+)", self.headers.get("Authorization", ""))
        with self.state.lock:
            self.state.log.append(f"{self.command} {self.path}")
            self.state.users.add(user[1] if user else "")
        self.cut = False
        if self.key.startswith("no-such-"):
            self.body(discard=True)
            return self.error(404, "NoSuchBucket")
        if fault := self.state.fault(self.command, self.path):
            if fault.what == "slow":
                time.sleep(fault.seconds)
            elif fault.what == "cut":
                self.cut = True
            elif fault.what == "drop":
                self.close_connection = True
                return None
            else:
                self.body(discard=True)
                return self.error(int(fault.what), "Fault")
        return getattr(self, f"on_{self.command.lower()}")()

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_one

    def control(self) -> None:
        state = self.state
        if self.command == "POST":
            said = json.loads(self.body())
            with state.lock:
                if said.get("reset"):
                    state.log.clear()
                    state.users.clear()
                    state.sent.clear()
                state.faults = [Fault(**one) for one in said["faults"]]
            return self.answer(200, b"{}")
        with state.lock:
            found = {
                "log": state.log,
                "users": sorted(state.users),
                "sent": state.sent,
                "faults": [asdict(f) for f in state.faults],
            }
            return self.answer(200, json.dumps(found).encode())

    # ---- answers

    def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{code} for {escape(self.key)}</Message></Error>"
        self.answer(status, text.encode(), Content_Type="application/xml")

    def body(self, into: Any = None, discard: bool = False) -> bytes:
        left = int(self.headers.get("Content-Length", 0))
        out = bytearray()
        while left:
            block = self.rfile.read(min(left, 1 << 20))
            if not block:
                break
            left -= len(block)
            if into is not None:
                into.write(block)
            elif not discard:
                out += block
        return bytes(out)

    def path_of(self, key: str) -> Path:
        return self.state.root / quote(key, safe="")

    def etag(self, path: Path) -> str:
        found = os.stat(path)
        return f'"{found.st_size:x}-{found.st_mtime_ns:x}"'

    # ---- requests

    def on_get(self) -> None:
        if "list-type" in self.query:
            return self.listing()
        path = self.path_of(self.key)
        try:
            file = open(path, "rb")  # noqa: SIM115
        except OSError:
            return self.error(404, "NoSuchKey")
        with file:
            size, tag = os.fstat(file.fileno()).st_size, self.etag(path)
            wanted = self.headers.get("If-Match")
            if wanted is not None and wanted != tag:
                return self.error(412, "PreconditionFailed")
            first, last, status = 0, size - 1, 200
            if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, status = int(found[1]), 206
                last = min(int(found[2] or last), last)
                if first >= size:
                    return self.error(416, "InvalidRange")
            self.send_response(status)
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("ETag", tag)
            self.send_header("x-goog-generation", str(os.stat(path).st_mtime_ns))
            self.send_header("Last-Modified", formatdate(os.stat(path).st_mtime, usegmt=True))
            if status == 206:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.end_headers()
            if self.command == "HEAD":
                return None
            length = last - first + 1
            if self.cut:
                length //= 2
                self.close_connection = True
            self.wfile.flush()
            with self.state.lock:
                self.state.sent["GET"] += length
            self.connection.sendfile(file, first, length)
        return None

    on_head = on_get

    def listing(self) -> None:
        bucket = self.key.strip("/")
        prefix = self.query.get("prefix", "")
        after = self.query.get("continuation-token", self.query.get("start-after", ""))
        names = sorted(unquote(n) for n in os.listdir(self.state.root) if not n.startswith(".up-"))
        keys = [n[len(bucket) + 1 :] for n in names if n.startswith(f"{bucket}/")]
        keys = [k for k in keys if k.startswith(prefix) and k > after]
        page = keys[: int(self.query.get("max-keys", 1000))]
        rows = []
        for key in page:
            path = self.path_of(f"{bucket}/{key}")
            found = os.stat(path)
            when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(found.st_mtime))
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{found.st_size}</Size>"
                f"<LastModified>{when}.{found.st_mtime_ns // 10**6 % 1000:03d}Z</LastModified>"
                f"<ETag>{escape(self.etag(path))}</ETag></Contents>"
            )
        more = len(page) < len(keys)
        token = ""
        if more:
            token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        text = (
            '<?xml version="1.0"?><ListBucketResult><IsTruncated>'
            f"{str(more).lower()}</IsTruncated>{token}{''.join(rows)}</ListBucketResult>"
        )
        self.answer(200, text.encode(), Content_Type="application/xml")

    def on_put(self) -> None:
        if "partNumber" in self.query:
            upload = self.state.root / f".up-{self.query['uploadId']}"
            path = upload / f"{int(self.query['partNumber']):06d}"
            if not upload.is_dir():
                self.body(discard=True)
                return self.error(404, "NoSuchUpload")
        else:
            path = self.path_of(self.key)
        beside = self.state.root / f".up-{threading.get_ident()}-{time.time_ns()}"
        with open(beside, "wb") as file:
            self.body(file)
        os.replace(beside, path)
        return self.answer(200, ETag=self.etag(path))

    def on_post(self) -> None:
        if "uploads" in self.query:
            upload = hashlib.md5(f"{self.key}{time.time_ns()}".encode()).hexdigest()
            (self.state.root / f".up-{upload}").mkdir()
            text = f"<R><UploadId>{upload}</UploadId></R>"
            text = text.replace("R>", "InitiateMultipartUploadResult>")
            return self.answer(200, text.encode(), Content_Type="application/xml")
        if "uploadId" in self.query:
            self.body()
            upload = self.state.root / f".up-{self.query['uploadId']}"
            parts = sorted(upload.iterdir())
            with open(parts[0], "ab") as whole:  # in place: a copy would take as long as the upload
                for part in parts[1:]:
                    with open(part, "rb") as one:
                        shutil.copyfileobj(one, whole, 8 << 20)
                    part.unlink()
            path = self.path_of(self.key)
            os.replace(parts[0], path)
            upload.rmdir()
            text = (
                "<CompleteMultipartUploadResult><ETag>"
                f"{escape(self.etag(path))}</ETag></CompleteMultipartUploadResult>"
            )
            return self.answer(200, text.encode(), Content_Type="application/xml")
        if "delete" in self.query:
            bucket = self.key.strip("/")
            keys = re.findall(r"<Key>(.*?)</Key>", self.body().decode())
            for key in keys:
                key = key.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
                self.path_of(f"{bucket}/{key}").unlink(missing_ok=True)
            text = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return self.answer(
                200, f"<DeleteResult>{text}</DeleteResult>".encode(), Content_Type="application/xml"
            )
        return self.error(400, "NotImplemented")

    def on_delete(self) -> None:
        self.body()
        self.path_of(self.key).unlink(missing_ok=True)
        self.answer(204)


class Server:
    """The server in a process of its own, and what a test tells it."""

    def __init__(self, root: Path, module: str = "tests.helpers.s3_server") -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(root)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def environment(self) -> dict[str, str]:
        """Returns the variables with which a client finds the server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "not-to-be-printed",
            "AWS_REGION": "us-east-1",
        }

    def set(self, *faults: Fault, reset: bool = True) -> None:
        """Sets the faults, and forgets the log."""
        data = json.dumps({"faults": [asdict(f) for f in faults], "reset": reset}).encode()
        urllib.request.urlopen(f"{self.url}/_control", data).read()

    def control(self) -> dict[str, Any]:
        """Returns the log since it was reset, and the faults that are left."""
        with urllib.request.urlopen(f"{self.url}/_control") as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def keys(self, bucket: str) -> dict[str, Path]:
        """Returns the objects of a bucket."""
        names = [unquote(n) for n in os.listdir(self.root) if not n.startswith(".up-")]
        return {
            n.partition("/")[2]: self.root / quote(n, safe="")
            for n in sorted(names)
            if n.startswith(f"{bucket}/")
        }

    def put(self, bucket: str, folder: Path, prefix: str = "") -> None:
        """Puts the files of a directory into a bucket."""
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            key = f"{bucket}/{prefix}{path.relative_to(folder).as_posix()}"
            there = self.root / quote(key, safe="")
            there.unlink(missing_ok=True)
            shutil.copyfile(path, there)

    def fetch(self, bucket: str, prefix: str, folder: Path) -> Path:
        """Writes the objects below a prefix to a directory."""
        for key, path in self.keys(bucket).items():
            if key.startswith(prefix):
                to = folder / key[len(prefix) :].lstrip("/")
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(path.read_bytes())
        return folder

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class _Threads(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # the client was killed
            super().handle_error(request, client_address)


def main(handler: type[Handler] = Handler) -> None:
    handler.state = State(Path(sys.argv[1]))
    server = _Threads(("127.0.0.1", 0), handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
