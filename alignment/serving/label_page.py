"""The page of `alignment label` over HTTP, by Python's own server: on the loopback interface, for those who have the token.

Nothing is answered without the token, under another host's name, or to a page of another origin. Questions and answers come
from functions that are handed in.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from jinja2 import Template

from alignment.errors import UserError
from alignment.serving.protocol import JSON, BadRequest

PAGE = Template((Path(__file__).parent / "templates" / "label.html.jinja").read_text(encoding="utf-8"), autoescape=True)
LOCAL_NAMES = ("localhost", "127.0.0.1")
MOST_BYTES = 2**16  # of a body
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "X-Content-Type-Options": "nosniff",
}
POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)

# That a client is told; an OSError: the file of labels cannot be written.
REASONS = (ValueError, LookupError, TypeError, RecursionError, OSError)
Route = Callable[[JSON], JSON]  # UserError for a body that is wrong


class LabelServer(ThreadingHTTPServer):
    """A server of the page and of the routes that it calls, each by a POST of a JSON object.

    Attributes:
        token: drawn anew at each start.
    """

    daemon_threads = True

    def __init__(self, port: int, routes: Mapping[str, Route], annotator: str | None):
        """`port`: 0 takes a free one; `annotator`: whom the page is for, None: it asks for the name."""
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"--port {port}: {error}; --port 0 takes a free port") from error
        self.routes, self.annotator, self.token = routes, annotator, secrets.token_urlsafe(32)

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: LabelServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 30  # seconds that a client may be silent

    def do_GET(self) -> None:
        """Answer with the page."""
        address, nonce = urlsplit(self.path), secrets.token_urlsafe(16)

        def page() -> str:
            if address.path != "/":
                raise BadRequest("no such page", status=404)
            return PAGE.render(nonce=nonce, annotator=self.server.annotator or "")

        self._answer(parse_qs(address.query).get("token", [""])[0], page, "text/html", POLICY.format(nonce))

    def do_POST(self) -> None:
        """Answer with what a route gives."""
        length = self.headers.get("Content-Length", "")

        def result() -> str:
            if self.path not in self.server.routes:
                raise BadRequest("no such page", status=404)
            if self.headers.get_content_type() != "application/json" or not length.isdecimal():
                raise BadRequest(
                    "the body must be JSON, with its length", status=415
                )  # no form of another page sends it
            if int(length) > MOST_BYTES:
                raise BadRequest(f"the body has more than {MOST_BYTES} bytes", status=413)
            body = json.loads(self.rfile.read(int(length)))
            if not isinstance(body, dict):
                raise BadRequest("the body must be a JSON object")
            return json.dumps(self.server.routes[self.path](body), ensure_ascii=False)

        self._answer(self.headers.get("Authorization", "").removeprefix("Bearer "), result)

    def _answer(
        self, token: str, text: Callable[[], str], kind: str = "application/json", policy: str = "default-src 'none'"
    ) -> None:
        """Send a text to a client that may have it; else, or where it cannot be made, the reason."""
        status = 200
        try:
            self._check(token)
            content = text().encode()
        except REASONS as error:
            status = getattr(error, "status", 500 if isinstance(error, OSError) else 400)
            kind, content = "application/json", json.dumps({"error": str(error)}).encode()
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        for name, value in {**HEADERS, **headers, "Content-Security-Policy": policy}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _check(self, token: str) -> None:
        """Refuse who has no token, a name of this machine that another site has made, and pages of other origins."""
        host = self.headers.get("Host", "")
        own_name = host.removesuffix(f":{host.rpartition(':')[2]}") in LOCAL_NAMES  # a tunnel may have another port
        own_page = self.headers.get("Origin", f"http://{host}") == f"http://{host}"
        if not (own_name and own_page and self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")):
            raise BadRequest("other hosts' names and pages of other origins are not answered", status=403)
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            raise BadRequest("the address lacks the token: open the one that the terminal shows", status=403)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the first line of a request holds the token."""
