"""A stand-in for an API server: healthy, with a child, and told how to misbehave.

python _server.py [stubborn|broken|loud] --host H --port P ...
"""

import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def main() -> None:
    if "broken" in sys.argv:
        print("loading", flush=True)  # noqa: T201
        sys.exit("no such model")
    if "loud" in sys.argv:  # more than a pipe holds
        print("loading\n" * 50_000, flush=True)  # noqa: T201
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A child, as vLLM's engine core is one; it ends by signals alone.
    if not os.fork():
        while True:
            signal.pause()
    address = (sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1]))
    print("serving", flush=True)  # noqa: T201
    HTTPServer(address, Handler).serve_forever()


if __name__ == "__main__":
    main()
