"""Buckets on this machine: S3 by moto, Google Cloud Storage by a fake, and a faulty proxy."""

import contextlib
import http.client
import itertools
import json
import os
import socket
import threading
import time
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
                return self.answer(412)
            number = next(self.server.generations)
            self.server.objects[query["name"]] = number, body
        return self.answer_json(self.described(query["name"], number, body))

    def do_DELETE(self):
        with self.server.lock:
            if not self.is_allowed(self.name(), self.query()):
                return self.answer(412)
            found = self.server.objects.pop(self.name(), None)
        return self.answer(404 if found is None else 204)

    def do_GET(self):
        if urlsplit(self.path).path.endswith("/o"):
            return self.answer_json({"items": self.listed(self.query())})
        found = self.server.objects.get(self.name())
        if found is None:
            return self.answer(404)
        generation, data = found
        headers = {"x-goog-generation": generation, "x-goog-stored-content-length": len(data)}
        if self.query().get("alt") != "media":
            return self.answer_json(self.described(self.name(), *found))
        if "Range" not in self.headers:
            return self.answer(200, data, headers)
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        begin = int(first) if first else max(0, len(data) - int(last))
        end = min(len(data), int(last) + 1) if first and last else len(data)
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        return self.answer(206, data[begin:end], headers)

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
            self.described(n, *x) for n, x in every if n.startswith(prefix) and first <= n < end
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
            return self.hang_up()
        if isinstance(fault, int):
            return self.answer(fault, b"no")
        if fault == "delay":
            time.sleep(0.1)
        connection = http.client.HTTPConnection(*upstream, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        connection.request(self.command, self.path, body, headers)
        found = connection.getresponse()
        data = found.read()
        connection.close()
        if fault == "lose":
            return self.hang_up()
        dropped = ("content-length", "transfer-encoding", "connection")
        headers = {k: v for k, v in found.getheaders() if k.lower() not in dropped}
        if fault == "flip" and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if fault != "cut" or not data:
            return self.answer(found.status, data, headers)
        self.answer(found.status, data, headers, sent=len(data) // 2)
        return self.hang_up()

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
    from moto.server import ThreadedMotoServer  # takes seconds to import

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        root = "http://{}:{}".format(*server.get_host_and_port())
        for method, path in (("POST", "moto-api/reset"), ("PUT", "bucket")):
            request = urllib.request.Request(f"{root}/{path}", method=method)
            urllib.request.urlopen(request, timeout=60).close()
        yield server.get_host_and_port()
    finally:
        server.stop()


def set_environment(patch, scheme, address):
    """Set the variables that lead clients of a scheme to an address."""
    host = "{}:{}".format(*address)
    found = {"STORAGE_EMULATOR_HOST": host, "TENSORSTORE_GCS_HTTP_URL": f"http://{host}"}
    found["GCE_METADATA_ROOT"] = "127.0.0.1:1"
    if scheme == "s3":
        found = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}
        found |= {"AWS_ENDPOINT_URL": f"http://{host}", "AWS_REGION": "us-east-1"}
        found |= dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    for name, value in found.items():
        patch.setenv(name, value)
