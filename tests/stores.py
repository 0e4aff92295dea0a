"""A store for tests: a folder served over HTTP on the loopback device, with ranges and etags, that fails as it is told to."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Store:
    """What the server has been asked, and what it is to do next."""

    folder: Path
    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, range) of each request."""
    failures: list[str] = field(default_factory=list)
    """What becomes of the next GETs: ``reset``, ``truncate``, ``stall`` or a status; the first one is taken first."""
    always: str = ""
    """What becomes of all others."""
    ranges: bool = True
    etags: bool = True
    go_on: threading.Event = field(default_factory=threading.Event)
    """Ends what stalls."""
    asked: threading.Event = field(default_factory=threading.Event)
    """Set by a request that stalls."""

    @property
    def gets(self) -> list[str]:
        """Ranges of the GETs so far."""
        return [part for method, _, part in self.requests if method == "GET"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        store, wanted = self.store, self.headers.get("Range", "")
        store.requests.append((self.command, self.path, wanted))
        failure = (store.failures.pop(0) if store.failures else store.always) if body else ""
        if failure == "stall":
            store.asked.set()
            store.go_on.wait(60)
        if failure == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        path = store.folder / self.path.partition("?")[0].lstrip("/")
        if failure.isdecimal() or not path.exists():
            self._head(int(failure or 404), 0)
            return
        if path.is_dir():
            data = "".join(f'<a href="{name.name}">{name.name}</a>\n' for name in sorted(path.iterdir())).encode()
        else:
            data = path.read_bytes()
        etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        if self.headers.get("If-Match", etag) != etag:
            self._head(412, 0)
            return
        headers = {"ETag": etag} if store.etags else {}
        status, total = 200, len(data)
        if wanted and store.ranges:
            begin, end = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
            data, status = data[begin : end + 1], 206
            headers["Content-Range"] = f"bytes {begin}-{end}/{total}"
        self._head(status, len(data), headers)
        if body:
            self.wfile.write(data[: len(data) // 2] if failure == "truncate" else data)
        if failure == "truncate":
            self.close_connection = True

    def _head(self, status: int, length: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def served(folder: Path) -> Iterator[Store]:
    """Serves a folder for the time of the block."""
    store = Store(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": store}))
    server.daemon_threads = True
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="store", daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
