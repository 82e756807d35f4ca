"""A proxy in front of the real API server that a test tells to fail: it cuts, stalls, delays, refuses, or is away.

    with Proxy(cluster) as proxy, cluster.controller(kubeconfig=proxy.kubeconfig(cluster.token_kubeconfig(…))):
        proxy.lose_answer("PUT", "/trainjobs/", times=1)     # the server acts, the client never hears of it
        proxy.answer(429, path="/workloads", times=3, headers={"Retry-After": "1"})
        proxy.cut("GET", "watch=true")                       # those that are open now
        with proxy.stall("GET", "watch=true"): …             # connections stay open, nothing passes
        with proxy.away(): …                                 # nobody listens
        assert len(proxy.requests("PUT", "/trainjobs/")) == 1

TLS ends here, with the test cluster's own certificate, so it sees every request and its Authorization header. What no
rule speaks of passes unchanged, watches and followed logs chunk by chunk. A request is matched by its method (empty:
any) and by a regular expression, searched in its path with the query. Rules apply in the order in which they were
made, the first that fits; `times` is how often one applies, None until it is removed (`rule.remove()`, or the end of
its `with` block). When the API server itself is away, the client's connection is cut.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import pathlib
import re
import select
import socket
import ssl
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.waiting import unique

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}
PASS, ANSWER, LOSE_REQUEST, LOSE_ANSWER, STALL, STALL_ANSWER = "pass", "answer", "lose request", "lose", "stall", "hang"


@dataclass(eq=False)
class Request:
    """One request as it arrived. `status` is what the client was told, `server_status` what the server had said."""

    at: float  # monotonic
    method: str
    target: str  # the path with the query
    headers: dict[str, str]  # names in lower case
    body: bytes
    status: int | None = None  # None: nothing, yet or ever
    server_status: int | None = None  # None: it was never asked, or did not answer
    passed: list[float] = field(default_factory=list)  # when a piece of the answer's body was passed on
    lines: int = 0  # that were passed on: of a watch its events

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> dict[str, str]:
        return dict(urllib.parse.parse_qsl(self.target.partition("?")[2]))

    def fits(self, method: str, pattern: str) -> bool:
        return method in ("", self.method) and re.search(pattern, self.target) is not None


@dataclass(eq=False)
class Rule:
    """What happens to the requests that fit. `hits` are those it was applied to."""

    method: str
    pattern: str
    times: int | None
    kind: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    before: Callable[[Request], object] | None = None  # called first
    cut_after: int | None = None  # bytes of the answer's body
    lines: int = 0  # of the answer's body that pass first
    made: float = field(default_factory=time.monotonic)
    hits: list[Request] = field(default_factory=list)
    removed: threading.Event = field(default_factory=threading.Event)

    def remove(self) -> None:
        """It applies no more; what it stalls goes on."""
        self.removed.set()

    def __enter__(self) -> Rule:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Proxy:
    """Listens on a loopback port of its own, always the same, for the length of a `with` block."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        name = f"proxy-{unique()}"
        self.port: int = cluster.processes.ports(name)[name]  # reserved, also while nobody listens
        self.server = f"https://127.0.0.1:{self.port}"
        self.upstream: int = cluster.components.ports["kube-apiserver"]
        self.trust = ssl.create_default_context(cafile=str(cluster.components.authority))
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(cluster.components.serving.certificate, cluster.components.serving.key)
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._requests: list[Request] = []
        self._open: set[_Handler] = set()
        self._server: _Server | None = None
        self.errors: list[BaseException] = []  # of this program itself

    def kubeconfig(self, source: pathlib.Path) -> pathlib.Path:
        """A copy of a kubeconfig, of a ServiceAccount's token for instance, that leads through this proxy."""
        config = yaml.safe_load(source.read_text())
        config["clusters"][0]["cluster"]["server"] = self.server
        file = source.with_name(f"{source.stem}.{self.port}.{unique()}.kubeconfig")
        file.write_text(yaml.safe_dump(config))
        return file

    # --- rules

    def answer(
        self,
        status: int,
        method: str = "",
        path: str = "",
        *,
        times: int | None = None,
        headers: dict[str, str] | None = None,
        body: object = None,
    ) -> Rule:
        """Answers itself, without asking the server; by default with a Status object of this code."""
        if body is None:
            reason = http.client.responses.get(status, "").replace(" ", "")
            body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": status}
            body["message"] = f"the proxy says {status}"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._add(Rule(method, path, times, ANSWER, status, {**(headers or {})}, data))

    def lose_request(self, method: str = "", path: str = "", *, times: int | None = None) -> Rule:
        """Cuts the connection before the server hears of the request."""
        return self._add(Rule(method, path, times, LOSE_REQUEST))

    def lose_answer(self, method: str = "", path: str = "", *, times: int | None = None) -> Rule:
        """Cuts the connection after the server has acted, before any of its answer is passed on.

        When it has not acted (a conflict, for instance), the answer passes, and the rule waits for the next request.
        """
        return self._add(Rule(method, path, times, LOSE_ANSWER))

    def cut_after(self, size: int, method: str = "", path: str = "", *, times: int | None = None) -> Rule:
        """Cuts the connection after so many bytes of the answer's body, in the middle of an event for instance."""
        return self._add(Rule(method, path, times, PASS, cut_after=size))

    def delay(self, seconds: float, method: str = "", path: str = "", *, times: int | None = None) -> Rule:
        """Passes the request on so much later."""
        return self.call(lambda _: time.sleep(seconds), method, path, times=times)

    def call(
        self, function: Callable[[Request], object], method: str = "", path: str = "", *, times: int | None = None
    ) -> Rule:
        """Calls the function, then passes the request on: for a change of the world at just that moment."""
        return self._add(Rule(method, path, times, PASS, before=function))

    def stall(self, method: str = "", path: str = "", *, times: int | None = None, acted: bool = False) -> Rule:
        """From now on nothing passes, and no connection is closed; what is open already stalls too.

        A new request does not reach the server, unless `acted`: then only its answer stays away, when it has acted.
        """
        return self._add(Rule(method, path, times, STALL_ANSWER if acted else STALL))

    def stall_open(self, method: str = "", path: str = "", *, lines: int = 0) -> Rule:
        """Like `stall`, for what is open now and nothing that comes later, once so many lines of it have passed."""
        return self._add(Rule(method, path, 0, STALL, lines=lines))

    def clear(self) -> None:
        """Removes every rule."""
        with self._lock:
            rules, self._rules = self._rules, []
        for rule in rules:
            rule.remove()

    # --- what is done now

    def cut(self, method: str = "", path: str = "") -> int:
        """Cuts the connections of the requests that are being answered, such as open watches; says how many."""
        with self._lock:
            handlers = [h for h in self._open if h.current is not None and h.current.fits(method, path)]
        for handler in handlers:
            handler.cut()
        return len(handlers)

    def leave(self) -> None:
        """Cuts every connection, and nobody listens any more."""
        if self._server is not None:
            server, self._server = self._server, None
            server.shutdown()
            server.server_close()
            with self._lock:
                handlers = list(self._open)
            for handler in handlers:
                handler.cut()

    def listen(self) -> None:
        """Starts to listen, again after `leave`."""
        if self._server is None:
            server = self._server = _Server(self, self._tls)
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Nobody listens during the `with` block."""
        self.leave()
        try:
            yield
        finally:
            self.listen()

    # --- what came

    def requests(self, method: str = "", path: str = "", *, since: float = 0.0) -> list[Request]:
        """The requests that fit, in order of their arrival, from a moment (monotonic) on."""
        with self._lock:
            return [r for r in self._requests if r.at >= since and r.fits(method, path)]

    def open_requests(self, method: str = "", path: str = "") -> list[Request]:
        """Those that are being answered right now."""
        with self._lock:
            return [h.current for h in self._open if h.current is not None and h.current.fits(method, path)]

    # --- its life

    def __enter__(self) -> Proxy:
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
        self.leave()
        with self._lock:
            handlers = list(self._open)
        for handler in handlers:
            handler.thread.join(timeout=10)
        if self.errors and error is None:
            raise self.errors[0]

    # --- for the handlers

    def _add(self, rule: Rule) -> Rule:
        with self._lock:
            self._rules.append(rule)
        return rule

    def take(self, request: Request) -> Rule | None:
        """Notes the request, and finds the rule for it."""
        with self._lock:
            self._requests.append(request)
            rule = self._find(request, lambda rule: rule.times is None or len(rule.hits) < rule.times)
            if rule:
                rule.hits.append(request)
            return rule

    def stalled(self, request: Request) -> Rule | None:
        """The rule that keeps this request's answer back, when there is one."""

        def stalls(rule: Rule) -> bool:
            applies = request.lines >= rule.lines and (request.at < rule.made or request in rule.hits)
            return rule.kind in (STALL, STALL_ANSWER) and applies

        with self._lock:
            return self._find(request, stalls)

    def _find(self, request: Request, also: Callable[[Rule], bool]) -> Rule | None:
        rules = (r for r in self._rules if not r.removed.is_set() and request.fits(r.method, r.pattern) and also(r))
        return next(rules, None)

    def opened(self, handler: _Handler) -> None:
        with self._lock:
            self._open.add(handler)

    def closing(self, server: _Server) -> bool:
        """Whether a connection to this server came too late."""
        return self._server is not server

    def closed(self, handler: _Handler) -> None:
        with self._lock:
            self._open.discard(handler)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, proxy: Proxy, tls: ssl.SSLContext) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", proxy.port), _Handler)
        # the handshake is made by the connection's own thread, at its first read
        self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # the base class's parameters
        error = sys.exception()
        if error is not None and not isinstance(error, (OSError, ValueError)):  # a connection that is gone is expected
            self.proxy.errors.append(error)


class _Cut(OSError):
    """The connection to the client is to be cut."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection of a client, and the one to the server that its requests are passed on over."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    connection: ssl.SSLSocket

    def setup(self) -> None:
        super().setup()
        self.proxy = self.server.proxy
        self.thread = threading.current_thread()
        self.current: Request | None = None
        self.gone = threading.Event()
        self.upstream = http.client.HTTPSConnection("127.0.0.1", self.proxy.upstream, context=self.proxy.trust)
        self.proxy.opened(self)
        if self.proxy.closing(self.server):
            self.cut()

    def finish(self) -> None:
        self.gone.set()
        self.upstream.close()
        self.proxy.closed(self)
        with contextlib.suppress(OSError):
            super().finish()

    def cut(self) -> None:
        """Ends both connections, without a goodbye; from any thread."""
        self.gone.set()
        for sock in (self.connection, self.upstream.sock):
            if sock is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(
                        sock, socket.SHUT_RDWR
                    )  # the TLS socket's own drops the TLS state that the other thread still reads with

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: `Proxy.requests` has them all."""

    def answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size) if size else b""
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = self.current = Request(time.monotonic(), self.command, self.path, headers, body)
        try:
            self.apply(request, self.proxy.take(request))
        except (OSError, http.client.HTTPException):
            self.cut()
            self.close_connection = True
        finally:
            self.current = None

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815  # the base class's names

    def apply(self, request: Request, rule: Rule | None) -> None:
        kind = rule.kind if rule else PASS
        if rule and rule.before:
            rule.before(request)
        if rule and kind == ANSWER:
            request.status = rule.status
            self.send_response_only(rule.status)
            headers = {"Content-Type": "application/json", "Date": self.date_time_string(), **rule.headers}
            self.send_head([*headers.items(), ("Content-Length", str(len(rule.body)))])
            self.wfile.write(rule.body)
            return
        if kind == LOSE_REQUEST:
            raise _Cut
        if kind == STALL:
            self.wait_while_stalled(request)
        response = self.ask(request)
        request.server_status = response.status
        if rule and kind in (LOSE_ANSWER, STALL_ANSWER) and response.status >= 300:
            rule.hits.remove(request)
            kind = PASS
        if kind == LOSE_ANSWER:
            response.read()
            raise _Cut
        self.wait_while_stalled(request)
        request.status = response.status
        self.pass_on(request, response, rule.cut_after if rule else None)

    def ask(self, request: Request) -> http.client.HTTPResponse:
        upstream = self.upstream
        if upstream.sock and select.select([upstream.sock], [], [], 0)[0]:  # the server has closed it meanwhile
            upstream.close()
        if upstream.sock is None:
            upstream.connect()
            if self.gone.is_set():
                raise _Cut
        upstream.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in HOP_BY_HOP:
                upstream.putheader(name, value)
        upstream.endheaders(request.body)
        return upstream.getresponse()

    def pass_on(self, request: Request, response: http.client.HTTPResponse, cut_after: int | None) -> None:
        self.send_response_only(response.status, response.reason)
        headers = [(name, value) for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP]
        chunked = "Content-Length" not in response.headers and response.status not in (204, 304)
        self.send_head(headers + [("Transfer-Encoding", "chunked")] * chunked)
        passed = 0
        while chunk := response.read1(65536):
            self.wait_while_stalled(request)
            if cut_after is not None:
                chunk = chunk[: cut_after - passed]
            passed += len(chunk)
            request.passed.append(time.monotonic())
            request.lines += chunk.count(b"\n")
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk) if chunked and chunk else chunk)
            if passed == cut_after:
                raise _Cut
        if response.length:  # the server has not said all that it announced
            raise _Cut
        response.close()  # http.client does not notice the end by itself when it reads with read1
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def send_head(self, headers: list[tuple[str, str]]) -> None:
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def wait_while_stalled(self, request: Request) -> None:
        while rule := self.proxy.stalled(request):
            while not rule.removed.wait(0.1):
                if self.gone.is_set():
                    raise _Cut
