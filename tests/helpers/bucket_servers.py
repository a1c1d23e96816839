"""Buckets on this machine: S3 by moto, Google Cloud Storage by a fake, and a faulty proxy."""

import contextlib
import http.client
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class Handler(BaseHTTPRequestHandler):
    """Answers one request after the other, and logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status, body=b"", headers=(), sent=None):
        """Answer with a body, of which only the first `sent` bytes arrive if that is given."""
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])

    def log_message(self, *_):
        pass


class Gcs(Handler):
    """What tensorstore asks of the JSON interface: insert, get, list, delete, preconditions."""

    def do_POST(self):
        query, body = self.query(), self.body()
        with self.server.lock:
            if not self.is_allowed(query["name"], query):
                self.answer(412)
                return
            number = next(self.server.generations)
            self.server.objects[query["name"]] = number, body
        self.answer_json(self.described(query["name"], number, body))

    def do_DELETE(self):
        with self.server.lock:
            if not self.is_allowed(self.name(), self.query()):
                self.answer(412)
                return
            found = self.server.objects.pop(self.name(), None)
        self.answer(404 if found is None else 204)

    def do_GET(self):
        if urlsplit(self.path).path.endswith("/o"):
            self.answer_json({"items": self.listed(self.query())})
            return
        found = self.server.objects.get(self.name())
        if found is None:
            self.answer(404)
            return
        generation, data = found
        headers = {"x-goog-generation": generation, "x-goog-stored-content-length": len(data)}
        if self.query().get("alt") != "media":
            self.answer_json(self.described(self.name(), *found))
            return
        if "Range" not in self.headers:
            self.answer(200, data, headers)
            return
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        begin = int(first) if first else max(0, len(data) - int(last))
        end = min(len(data), int(last) + 1) if first and last else len(data)
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self.answer(206, data[begin:end], headers)

    def query(self):
        return {name: some[-1] for name, some in parse_qs(urlsplit(self.path).query).items()}

    def name(self):
        return unquote(urlsplit(self.path).path.split("/o/", 1)[1])

    def is_allowed(self, name, query):
        wanted = query.get("ifGenerationMatch")
        return wanted is None or int(wanted) == self.server.objects.get(name, (0,))[0]

    def listed(self, query):
        prefix, first = query.get("prefix", ""), query.get("startOffset", "")
        end = query.get("endOffset") or "\U0010ffff"
        every = sorted(self.server.objects.items())
        return [
            self.described(name, *found)
            for name, found in every
            if name.startswith(prefix) and first <= name < end
        ]

    def described(self, name, generation, data):
        return {"name": name, "generation": f"{generation}", "size": f"{len(data)}"}

    def answer_json(self, value):
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


class Proxy(Handler):
    """Passes requests on, but for what `rule(method, path, body)` says: a fault, or None."""

    def do_GET(self):
        body, upstream = self.body(), self.server.upstream
        fault = self.server.rule(self.command, self.path, body)
        self.server.seen.append((self.command, self.path, fault))
        if fault == "reset":
            self.hang_up()
            return
        if isinstance(fault, int):
            self.answer(fault, b"no")
            return
        if fault == "delay":
            time.sleep(0.1)
        connection = http.client.HTTPConnection(*upstream, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        connection.request(self.command, self.path, body, headers)
        found = connection.getresponse()
        data = found.read()
        connection.close()
        if fault == "lose":
            self.hang_up()
            return
        dropped = ("content-length", "transfer-encoding", "connection")
        headers = {k: v for k, v in found.getheaders() if k.lower() not in dropped}
        if fault == "flip" and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if fault == "cut" and data:
            self.answer(found.status, data, headers, sent=len(data) // 2)
            self.hang_up()
            return
        self.answer(found.status, data, headers)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815

    def hang_up(self):
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Server(ThreadingHTTPServer):
    """Answers several requests at a time, and does not mind clients that are killed."""

    def handle_error(self, *_):
        pass


@contextlib.contextmanager
def serving(handler, **attributes):
    """Yield a server on a port of its own."""
    server = Server(("127.0.0.1", 0), handler)
    vars(server).update(attributes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def fake_gcs():
    """Return a context with a server of Google Cloud Storage; `objects` are in its memory."""
    return serving(Gcs, objects={}, lock=threading.Lock(), generations=itertools.count(1))


def proxy(upstream):
    """Return a context with a proxy before a server of this machine; its `rule` may be set."""
    return serving(Proxy, upstream=upstream, rule=lambda *_: None, seen=[])


@contextlib.contextmanager
def moto_s3():
    """Yield the address of an S3 server with one bucket, `bucket`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", f"{port}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as server:
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
            for _ in range(1200):
                try:
                    urllib.request.urlopen(request, timeout=10).close()
                    break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(0.1)
            yield "127.0.0.1", port
        finally:
            server.terminate()


def environment(scheme, address):
    """Return the variables that lead clients of a scheme to an address."""
    host = "{}:{}".format(*address)
    if scheme == "gs":
        nobody = {"GCE_METADATA_ROOT": "127.0.0.1:1", "TENSORSTORE_GCS_HTTP_URL": f"http://{host}"}
        return {"STORAGE_EMULATOR_HOST": host, **nobody}
    keys = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}
    return {"AWS_ENDPOINT_URL": f"http://{host}", "AWS_REGION": "us-east-1", **keys}


def set_environment(patch, scheme, address):
    for name, value in environment(scheme, address).items():
        patch.setenv(name, value)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        patch.setenv(name, os.devnull)
