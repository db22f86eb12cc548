"""The page of `alignment label` over HTTP, by Python's own server, on the loopback interface, for holders of the token.

Nothing is answered without the token, under another host's name, or to a page of another origin. Questions and answers
come from functions that are handed in.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from jinja2 import Template

from alignment.errors import UserError
from alignment.judging.labels import JSON

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
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; img-src data:; base-uri "
    "'none'; form-action 'none'; frame-ancestors 'none'"
)

# That a client is told; an OSError: the file of labels cannot be written.
REASONS = (ValueError, LookupError, TypeError, RecursionError, OSError)


class Refused(ValueError):
    """A request that is not answered, and its HTTP status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class LabelServer(ThreadingHTTPServer):
    """A server of the page and of the routes that it calls, each by a POST of a JSON object.

    Attributes:
        token: drawn anew at each start.
    """

    def __init__(self, port: int, routes: Mapping[str, Callable[[JSON], JSON]], annotator: str | None):
        """`port`: 0 takes a free one; `annotator`: whom the page is for, None: it asks for the name."""
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"--port {port}: {error}; --port 0 takes a free port") from error
        self.routes = routes
        self.annotator = annotator
        self.token = secrets.token_urlsafe(32)


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: LabelServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 30  # seconds that a client may be silent

    def do_GET(self) -> None:
        """Send the page, or what a route gives; where it may not be sent or cannot be made, the reason."""
        status = 200
        nonce = secrets.token_urlsafe(16)
        try:
            kind, content = self.page(nonce) if self.command == "GET" else self.result()
        except REASONS as error:
            status = getattr(error, "status", 500 if isinstance(error, OSError) else 400)
            kind = "application/json"
            content = json.dumps({"error": str(error)})
        self.send_response(status)
        content_headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content.encode()))}
        for name, value in {**HEADERS, **content_headers, "Content-Security-Policy": POLICY.format(nonce)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content.encode())

    do_POST = do_GET

    def page(self, nonce: str) -> tuple[str, str]:
        """Type and text of the page, whose script and style carry the nonce."""
        address = urlsplit(self.path)
        self.check(parse_qs(address.query).get("token", [""])[0], address.path == "/")
        return "text/html", PAGE.render(nonce=nonce, annotator=self.server.annotator or "")

    def result(self) -> tuple[str, str]:
        """Type and text of what a route gives; no form of another page can send what it asks for."""
        self.check(self.headers.get("Authorization", "").removeprefix("Bearer "), self.path in self.server.routes)
        length = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json" or not length.isdecimal() or int(length) > MOST_BYTES:
            raise Refused(f"the body must be JSON of at most {MOST_BYTES} bytes, with its length", status=415)
        body = dict(json.loads(self.rfile.read(int(length))))
        return "application/json", json.dumps(self.server.routes[self.path](body))

    def check(self, token: str, known: bool) -> None:
        """Refuse who has no token, a name of this machine that another site has made, and pages of other origins.

        Args:
            known: the address is one that is answered.
        """
        host = self.headers.get("Host", "")
        own_name = host.removesuffix(f":{host.rpartition(':')[2]}") in LOCAL_NAMES  # a tunnel may have another port
        own_page = self.headers.get("Origin", f"http://{host}") == f"http://{host}"
        own_page &= self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        if not (own_name and own_page and secrets.compare_digest(token.encode(), self.server.token.encode())):
            raise Refused("the token is missing, or this is another address: open the one in the terminal", status=403)
        if not known:
            raise Refused("no such page", status=404)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the first line of a request holds the token."""
