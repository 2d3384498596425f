"""A server on loopback that answers as the Hugging Face Hub does."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

COMMIT = "c" * 40


class MockHub:
  """Repositories of a server, and what was asked of it.

  Attributes:
    repos: Files by name of each repository, "owner/name".
    refused: Status and error code of repositories that are not open.
    tokens: Tokens that open those.
    cut: Bytes after which the next download ends, or None.
    requests: Methods, paths and ranges of the requests.
    commits: Repository, revision, message and files of each upload.
  """

  def __init__(self) -> None:
    self.repos: dict[str, dict[str, bytes]] = {}
    self.refused: dict[str, tuple[int, str]] = {}
    self.tokens: set[str] = set()
    self.cut: int | None = None
    self.down = False
    self.requests: list[tuple[str, str, str | None]] = []
    self.commits: list[dict[str, Any]] = []
    self.url = ""

  def downloads(self) -> list[str]:
    """Names of the files that were downloaded."""
    return [
      path.rpartition("/")[2]
      for method, path, _ in self.requests
      if method == "GET" and "/resolve/" in path
    ]


class _Handler(http.server.BaseHTTPRequestHandler):
  hub: MockHub
  protocol_version = "HTTP/1.1"

  def log_message(self, *args: Any) -> None:
    del args

  def _send(
    self, status: int, body: bytes = b"", headers: dict[str, str] | None = None
  ) -> None:
    self.send_response(status)
    headers = {"Content-Length": str(len(body))} | (headers or {})
    for key, value in headers.items():
      self.send_header(key, value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)

  def _json(self, value: Any) -> None:
    body = json.dumps(value).encode()
    self._send(200, body, {"Content-Type": "application/json"})

  def _error(self, status: int, code: str) -> None:
    self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

  def _repo(self, words: list[str]) -> dict[str, bytes] | None:
    repo = "/".join(words)
    token = self.headers.get("Authorization", "").removeprefix("Bearer ")
    if repo in self.hub.refused and token not in self.hub.tokens:
      self._error(*self.hub.refused[repo])
      return None
    if repo not in self.hub.repos:
      self._error(404, "RepoNotFound")
      return None
    return self.hub.repos[repo]

  def do_GET(self) -> None:
    path = urllib.parse.unquote(self.path.partition("?")[0])
    hub = self.hub
    hub.requests.append((self.command, path, self.headers.get("Range")))
    if hub.down:
      self._error(503, "Unavailable")
      return
    words = path.strip("/").split("/")
    if words[:2] == ["api", "models"]:
      files = self._repo(words[2:4])
      if files is None:
        return
      revision = words[5] if len(words) > 5 else "main"
      if revision not in ("main", "v1", COMMIT):
        self._error(404, "RevisionNotFound")
      elif words[4:5] == ["tree"]:
        self._json(
          [
            {
              "type": "file",
              "path": name,
              "size": len(data),
              "oid": hashlib.sha1(data).hexdigest(),
            }
            for name, data in files.items()
          ]
        )
      else:
        siblings = [{"rfilename": name} for name in files]
        self._json(
          {"id": "/".join(words[2:4]), "sha": COMMIT, "siblings": siblings}
        )
      return
    files = self._repo(words[:2])
    if files is None:
      return
    name = "/".join(words[4:])
    if name not in files:
      self._error(404, "EntryNotFound")
      return
    data = files[name]
    headers = {
      "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
      "X-Repo-Commit": COMMIT,
      "Accept-Ranges": "bytes",
    }
    if self.command == "HEAD":
      self._send(200, headers=headers | {"Content-Length": str(len(data))})
      return
    status, part = 200, data
    if asked := self.headers.get("Range"):
      start, _, end = asked.removeprefix("bytes=").partition("-")
      part = data[int(start) : int(end) + 1 if end else None]
      status = 206
      headers["Content-Range"] = (
        f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}"
      )
    headers["Content-Length"] = str(len(part))
    if hub.cut is not None and len(part) > hub.cut:
      part, hub.cut = part[: hub.cut], None
      self.close_connection = True
    self._send(status, part, headers)

  do_HEAD = do_GET  # noqa: N815

  def do_POST(self) -> None:
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    path = urllib.parse.unquote(self.path.partition("?")[0])
    self.hub.requests.append(("POST", path, None))
    token = self.headers.get("Authorization", "").removeprefix("Bearer ")
    if token not in self.hub.tokens:
      self._error(401, "Unauthorized")
      return
    words = path.strip("/").split("/")
    if path == "/api/repos/create":
      wanted = json.loads(body)
      repo = "/".join(
        filter(None, (wanted.get("organization"), wanted["name"]))
      )
      self.hub.repos.setdefault(repo, {})
      self._json({"url": f"{self.hub.url}/{repo}"})
    elif path == "/api/validate-yaml":
      self._json({"errors": [], "warnings": []})
    elif words[4:5] == ["preupload"]:
      files = json.loads(body)["files"]
      self._json(
        {
          "files": [
            {
              "path": file["path"],
              "uploadMode": "regular",
              "shouldIgnore": False,
            }
            for file in files
          ]
        }
      )
    elif words[4:5] == ["commit"]:
      lines = [json.loads(line) for line in body.splitlines()]
      self._commit("/".join(words[2:4]), lines)
      repo = "/".join(words[2:4])
      url = f"{self.hub.url}/{repo}/commit/{COMMIT}"
      self._json({"commitUrl": url, "commitOid": COMMIT, "success": True})
    else:
      self._error(404, "EntryNotFound")

  def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
    import base64

    files = {
      line["value"]["path"]: base64.b64decode(line["value"]["content"])
      for line in lines
      if line["key"] == "file"
    }
    for line in lines:
      if line["key"] == "deletedFile":
        del self.hub.repos[repo][line["value"]["path"]]
    self.hub.repos[repo] |= files
    header = next(line["value"] for line in lines if line["key"] == "header")
    self.hub.commits.append(
      {"repo": repo, "message": header["summary"], "files": sorted(files)}
    )


@contextlib.contextmanager
def serve() -> Iterator[MockHub]:
  """Run a hub on a free port of loopback."""
  hub = MockHub()
  handler = type("Handler", (_Handler,), {"hub": hub})
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
  hub.url = f"http://127.0.0.1:{server.server_port}"
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  try:
    yield hub
  finally:
    server.shutdown()
    server.server_close()
