"""A small Hub on 127.0.0.1: what huggingface_hub asks to list and download a repository, and nothing else."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves `repositories`, folders by id. `gated` ids are refused; `asked` remembers each request."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.gated = repositories, gated
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """The three questions: what is at this revision, which files are there, give me one."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.asked.append(f"{self.command} /{path}")
        if path.startswith("api/models/"):
            self._api(path.removeprefix("api/models/"))
        elif "/resolve/" in path:
            repository, _, rest = path.partition("/resolve/")
            self._file(repository, *rest.split("/", 1))
        else:
            self._answer(404, {"error": "no such page"})

    def _api(self, path: str) -> None:
        repository, marker, rest = path, "", ""
        for marker in ("/revision/", "/tree/"):
            if marker in path:
                repository, _, rest = path.partition(marker)
                break
        if not self._known(repository):
            return
        revision = rest.split("/")[0] or "main"
        if revision not in ("main", COMMIT):
            self._answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            return
        files = sorted(path for path in self.server.repositories[repository].iterdir() if path.is_file())
        if marker == "/tree/" and "/tree/" in path:
            self._answer(200, [self._entry(file) for file in files])
        else:
            self._answer(
                200, {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": file.name} for file in files]}
            )

    def _entry(self, file: Path) -> dict[str, Any]:
        return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}

    def _file(self, repository: str, revision: str, name: str = "") -> None:
        if not self._known(repository):
            return
        file = self.server.repositories[repository] / name
        headers = {"X-Repo-Commit": COMMIT}
        if not file.is_file() or revision not in ("main", COMMIT):
            self._answer(404, {"error": "Entry not found"}, {**headers, "X-Error-Code": "EntryNotFound"})
            return
        self._send(200, file.read_bytes(), {**headers, "ETag": f'"{_etag(file)}"'})

    def _known(self, repository: str) -> bool:
        if repository in self.server.gated:
            self._answer(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        elif repository not in self.server.repositories:
            self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        else:
            return True
        return False

    def _answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serve(repositories: dict[str, Path], gated: tuple[str, ...] = ()) -> Iterator[Hub]:
    """A running Hub; it stops at the end of the block."""
    with Hub(repositories, gated) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def lay_out(cache: Path, repository: str, source: Path, *, commit: str = COMMIT) -> Path:
    """Put a folder into a Hub cache as a download would (blobs, links in a snapshot, a ref); returns the snapshot."""
    store = cache / ("models--" + repository.replace("/", "--"))
    snapshot = store / "snapshots" / commit
    for folder in (store / "blobs", store / "refs", snapshot):
        folder.mkdir(parents=True)
    for file in source.iterdir():
        blob = store / "blobs" / _etag(file)
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (store / "refs" / "main").write_text(commit, encoding="utf-8")
    return snapshot
