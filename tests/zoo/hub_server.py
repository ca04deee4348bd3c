"""A stand-in for the hub on loopback: as much of its protocol as its own client speaks to fetch and to publish."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """files by branch; large: names kept as LFS; commits: number so far; private: as it was made."""

    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    large: set[str] = field(default_factory=set)
    commits: int = 0
    private: bool = False


@dataclass
class Hub:
    """repositories by name. requests: (method, path) of each. breaks: after how many bytes the answer for a file ends, once each.
    altered: files that arrive with another first byte than the hub has on record. moves: what the next commit, made while a file is
    fetched, changes. uploads: bytes of each LFS object that was sent.
    refuse_uploads: how many of the next ones fail. tokens: Authorization headers seen. silent: pattern of the requests, as
    "GET /api/...", that get no answer until the hub is closed.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    altered: set[str] = field(default_factory=set)
    moves: dict[str, dict[str, bytes]] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    refuse_uploads: int = 0
    tokens: set[str] = field(default_factory=set)
    silent: str = r"(?!)"
    closed: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def add(self, name: str, files: dict[str, bytes]) -> None:
        large = {f for f in files if f.endswith(".safetensors")}
        self.repositories[name] = Repository({"main": dict(files)}, large, 1)


def commit_id(repository: Repository, branch: str) -> str:
    if re.fullmatch(r"[0-9a-f]{40}", branch):
        return branch  # a commit that no branch is at any more
    return hashlib.sha1(f"{repository.commits} {branch}".encode()).hexdigest()


def git_hash(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _reply(self, body: Any = None, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        if re.match(self.hub.silent, f"{self.command} {path}"):
            self.hub.closed.wait()
            self.close_connection = True
            return None
        for method, pattern, handle in ROUTES:
            found = re.fullmatch(pattern, path)
            if method == self.command and found:
                return handle(self, **found.groupdict())
        return self._reply({"error": f"nothing at {path}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = _route

    def _repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        if found is None:
            self._reply({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        return found

    def _branch(self, repository: Repository, revision: str | None) -> str | None:
        names = {commit_id(repository, b): b for b in repository.branches} | {b: b for b in repository.branches}
        if (revision or "main") not in names:
            self._reply({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
        return names.get(revision or "main")

    # ---- what is asked

    def info(self, name: str, revision: str | None = None) -> None:
        repository = self._repository(name)
        branch = repository and self._branch(repository, revision)
        if repository and branch:
            files = [self._sibling(repository, f, c) for f, c in repository.branches[branch].items()]
            self._reply({"id": name, "sha": commit_id(repository, branch), "private": repository.private, "siblings": files, "tags": []})

    @staticmethod
    def _sibling(repository: Repository, file: str, content: bytes) -> dict[str, Any]:
        found: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": git_hash(content)}
        if file in repository.large:
            found["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return found

    def tree(self, name: str, revision: str) -> None:
        repository = self._repository(name)
        branch = repository and self._branch(repository, revision)
        if repository and branch:
            rows = []
            for file, content in repository.branches[branch].items():
                row: dict[str, Any] = {"type": "file", "path": file, "size": len(content), "oid": git_hash(content)}
                if file in repository.large:
                    row["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
                rows.append(row)
            self._reply(rows)

    def file(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name)
        branch = repository and self._branch(repository, revision)
        if not repository or not branch:
            return None
        content = repository.branches[branch].get(file)
        if content is None:
            return self._reply({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        hashed = hashlib.sha256(content).hexdigest() if file in repository.large else git_hash(content)
        headers = {"ETag": f'"{hashed}"', "X-Repo-Commit": commit_id(repository, branch), "X-Linked-Size": str(len(content)),
                   "X-Linked-Etag": f'"{hashed}"', "Accept-Ranges": "bytes"}  # fmt: skip
        if self.command == "GET" and file in self.hub.moves:
            repository.branches[commit_id(repository, branch)] = repository.branches[branch]
            repository.branches[branch] = repository.branches[branch] | self.hub.moves.pop(file)
            repository.commits += 1
        if file in self.hub.altered:
            content = bytes([content[0] ^ 1]) + content[1:]
        return self._send_file(file, content, headers)

    def _send_file(self, file: str, content: bytes, headers: dict[str, str]) -> None:
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(start.group(1)) if start else 0
        if start:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        rest, broken = content[first:], self.hub.breaks.pop(file, None) if self.command == "GET" else None
        if broken is None:
            return self._reply(rest, 206 if start else 200, headers)
        self._reply(rest[:broken], 200, headers | {"Content-Length": str(len(rest))})
        self.close_connection = True
        return None

    # ---- what is sent

    def create(self) -> None:
        asked = json.loads(self._body())
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.hub.repositories:
            return self._reply({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, 409)
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.hub.repositories[name] = Repository(private=private)
        return self._reply({"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def branch(self, name: str, branch: str) -> None:
        repository = self._repository(name)
        self._body()
        if repository:
            exists = branch in repository.branches
            repository.branches.setdefault(branch, dict(repository.branches["main"]))
            self._reply({"error": "exists"} if exists else {}, 409 if exists else 200)

    def preupload(self, name: str, revision: str) -> None:
        files = json.loads(self._body())["files"]
        mode = ["lfs" if f["path"].endswith(".safetensors") else "regular" for f in files]
        self._reply({"files": [{"path": f["path"], "uploadMode": m, "shouldIgnore": False} for f, m in zip(files, mode, strict=True)]})

    def batch(self, name: str) -> None:
        objects = []
        for wanted in json.loads(self._body())["objects"]:
            row = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
            if wanted["oid"] not in self.hub.uploads:
                row["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}", "header": {}}}
            objects.append(row)
        self._reply({"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        content = self._body()
        if self.hub.refuse_uploads:
            self.hub.refuse_uploads -= 1
            return self._reply({"error": "broken"}, 400)
        self.hub.uploads[oid] = content
        return self._reply(b"")

    def commit(self, name: str, revision: str) -> None:
        repository = self._repository(name)
        lines = [json.loads(line) for line in self._body().splitlines()]
        branch = repository and self._branch(repository, revision)
        if not repository or not branch:
            return None
        parent = next(line["value"].get("parentCommit") for line in lines if line["key"] == "header")
        if parent not in (None, commit_id(repository, branch)):
            return self._reply({"error": "the branch has moved"}, 412)
        for line in lines:
            self._apply(repository, branch, line["key"], line["value"])
        repository.commits += 1
        oid = commit_id(repository, branch)
        return self._reply({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "hookOutput": ""})

    def _apply(self, repository: Repository, branch: str, key: str, value: dict[str, Any]) -> None:
        files = repository.branches[branch]
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = self.hub.uploads[value["oid"]]
            repository.large.add(value["path"])
        elif key == "deletedFile":
            del files[value["path"]]

    def yaml(self) -> None:
        self._body()
        self._reply({"errors": [], "warnings": []})


NAME = r"(?P<name>[^/]+/[^/]+)"
ROUTES = [
    ("GET", rf"/api/models/{NAME}", Handler.info),
    ("GET", rf"/api/models/{NAME}/revision/(?P<revision>[^/]+)", Handler.info),
    ("GET", rf"/api/models/{NAME}/tree/(?P<revision>[^/]+)/?", Handler.tree),
    ("GET", rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", Handler.file),
    ("HEAD", rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", Handler.file),
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", rf"/api/models/{NAME}/branch/(?P<branch>[^/]+)", Handler.branch),
    ("POST", rf"/api/models/{NAME}/preupload/(?P<revision>[^/]+)", Handler.preupload),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]+)", Handler.upload),
    ("POST", rf"/api/models/{NAME}/commit/(?P<revision>[^/]+)", Handler.commit),
    ("POST", r"/api/validate-yaml", Handler.yaml),
]


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that answers while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.closed.set()
        server.shutdown()
        server.server_close()
