"""Serves the page of a run on the loopback interface, to whoever has its address; nothing can be changed through it."""

import hmac
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pipeloom.errors import InputError
from pipeloom.watch.run_view import RunView, new_secret

_HOST = "127.0.0.1"


@contextmanager
def served(view: RunView, port: int) -> Iterator[str]:
    """Inside the block, a page is served; its address.

    Args:
        view: what the page shows.
        port: on the loopback interface; 0: a free one.

    Raises:
        InputError: the port is taken.
    """
    token = new_secret()
    try:
        server = _Server((_HOST, port), _handler(view, token))
    except OSError as error:
        raise InputError(f"--port {port}: {error.strerror}. Choose another port, or leave the option out.") from error
    thread = Thread(target=server.serve_forever, name="pipeloom-watch", daemon=True)
    thread.start()
    try:
        yield f"http://{_HOST}:{server.server_port}/?token={token}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a tab that was closed
            super().handle_error(request, client_address)


def _handler(view: RunView, token: str) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "pipeloom", ""

        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(asked.query).items()}
            # Another host name: a page elsewhere whose name was made to point here.
            if self.headers.get("Host", "").partition(":")[0] not in (_HOST, "localhost"):
                self._send(403, "text/plain", f"This page is served to http://{_HOST} alone.")
            elif not hmac.compare_digest(query.get("token", "").encode(), token.encode()):
                self._send(403, "text/plain", "The address needs the token that `pipeloom watch` printed.")
            elif asked.path == "/":
                nonce = new_secret()
                self._send(200, "text/html", view.page(nonce), script=f"'nonce-{nonce}'")
            elif asked.path == "/now":
                self._send(200, "application/json", view.now(query.get("version", "")))
            else:
                self._send(404, "text/plain", "There is no such page.")

        def _send(self, status: int, kind: str, text: str, script: str = "'none'") -> None:
            content = text.encode(errors="replace")  # files may have halves of surrogate pairs
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header(
                "Content-Security-Policy",
                f"default-src 'none'; style-src 'unsafe-inline'; script-src {script}; connect-src 'self'; "
                "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            )
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
