"""An HTTP service on this machine that answers as a test wants, for judges that score responses."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Stub(ThreadingHTTPServer):
    """A service whose answers are a function of the request: (status, headers, body); a list is sent piece by piece.

    A list instead of the three is the whole answer, status line and headers included.
    """

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.requests, self.lock = answer, [], threading.Lock()
        self.times: list[float] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/chat/completions"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((body, dict(self.headers)))
            self.server.times.append(time.monotonic())
            count = len(self.server.requests)
        text = self.server.answer(body, count)
        if not isinstance(text, list):
            status, headers, text = text
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
        try:
            for part in text if isinstance(text, list) else [text]:
                self.wfile.write(part.encode())
                if isinstance(text, list):
                    self.wfile.flush()
                    time.sleep(0.2)
        except OSError:  # the client has waited long enough and hung up, as it should
            pass

    def log_message(self, *arguments):
        pass


@contextmanager
def serving(answer):
    """A `Stub` while the block runs."""
    server = Stub(answer)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def good(value):
    return 200, {}, json.dumps({"score": value})
