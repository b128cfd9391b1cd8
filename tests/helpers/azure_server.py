"""A small server that speaks the protocol of Azure's blob service, made from the S3 server.

Three things differ from S3: how blobs are listed, how they are uploaded in parts, and how one
request removes many of them.

    python -m tests.helpers.azure_server DIRECTORY      prints its port
"""

from __future__ import annotations

import os
import re
import shutil
import time
from email.utils import formatdate
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

from tests.helpers import s3_server


class Handler(s3_server.Handler):
    def on_get(self) -> None:
        return self.blobs() if self.query.get("comp") == "list" else super().on_get()

    on_head = on_get

    def blobs(self) -> None:
        container = self.key.strip("/")
        start = f"{container}/{self.query.get('prefix', '')}"
        rows = []
        for name in sorted(unquote(n) for n in os.listdir(self.state.root)):
            if name.startswith(start):
                path = self.path_of(name)
                found = os.stat(path)
                rows.append(
                    f"<Blob><Name>{escape(name[len(container) + 1 :])}</Name><Properties>"
                    f"<Last-Modified>{formatdate(found.st_mtime, usegmt=True)}</Last-Modified>"
                    f"<Content-Length>{found.st_size}</Content-Length><Content-Type/>"
                    f"<Etag>{escape(self.etag(path))}</Etag></Properties></Blob>"
                )
        text = (
            f"<EnumerationResults><Blobs>{''.join(rows)}</Blobs><NextMarker/></EnumerationResults>"
        )
        self.answer(200, text.encode(), Content_Type="application/xml")

    def on_put(self) -> None:
        if "comp" not in self.query:
            return super().on_put()
        parts = self.state.root / f".up-{self.key.replace('/', '%2F')}"
        if self.query["comp"] == "block":
            parts.mkdir(exist_ok=True)
            with open(parts / self.query["blockid"].replace("/", "_"), "wb") as file:
                self.body(file)
            return self.answer(201)
        named = re.findall(r"<(?:Latest|Uncommitted)>(.*?)</", self.body().decode())
        path = self.path_of(self.key)
        beside = self.state.root / f".up-{time.time_ns()}"
        with open(beside, "wb") as whole:
            for one in named:
                with open(parts / one.replace("/", "_"), "rb") as part:
                    shutil.copyfileobj(part, whole)
        os.replace(beside, path)
        shutil.rmtree(parts)
        return self.answer(201, ETag=self.etag(path))

    def on_post(self) -> None:
        """Removes the blobs of a batch; answers one part for each."""
        asked = re.findall(r"Content-ID: (\d+).*?DELETE (\S+)", self.body().decode(), re.DOTALL)
        answers = []
        for number, target in asked:
            path = self.path_of(unquote(urlsplit(target).path).lstrip("/"))
            status = "202 Accepted" if path.exists() else "404 The specified blob does not exist."
            path.unlink(missing_ok=True)
            answers.append(
                "--batch\r\nContent-Type: application/http\r\nContent-ID: "
                f"{number}\r\n\r\nHTTP/1.1 {status}\r\n"
                "x-ms-request-id: 0\r\nx-ms-version: 2023-11-03\r\n\r\n"
            )
        text = "".join(answers) + "--batch--\r\n"
        self.answer(202, text.encode(), Content_Type="multipart/mixed; boundary=batch")


if __name__ == "__main__":
    s3_server.main(Handler)
