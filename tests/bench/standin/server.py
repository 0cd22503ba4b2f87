"""Stands for vLLM's server: answers what the sweep asks, in milliseconds. STANDIN in its environment says what fails.

no-start    ends with an error that looks like vLLM's before it listens
full:N      empties its prefix cache at the N-th try
dies:N      ends abruptly when the N-th cell of this start begins
sickens:N   from the N-th cell on /health is an error, and a second later it ends: what vLLM does without its engine
"""

import argparse
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--host")
parser.add_argument("--port", type=int)
args, _ = parser.parse_known_args()
wanted = os.environ.get("STANDIN", "")
cells, sick = 0, False

with open(os.environ["STANDIN_LOG"], "a") as log:  # noqa: PTH123
    log.write(f"server {os.getpid()}\n")
if wanted == "no-start":
    print("(EngineCore pid=12) ERROR 01-01 00:00:00 [core.py:1] ValueError: the head is 64 wide, the target 128")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    sys.exit(1)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if sick and self.path == "/health":
            self.send_error(503)
            return
        self._answer()

    def do_POST(self) -> None:
        global cells, sick
        cells += 1
        if wanted == f"sickens:{cells}":
            sick = True
            print("Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.")
            print("EngineDeadError: EngineCore encountered an issue.", flush=True)
            threading.Timer(1.0, lambda: os._exit(0)).start()
        self._answer()
        if wanted == f"dies:{cells}":
            print("ValueError: out of everything", flush=True)
            os._exit(1)

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "17")
        self.end_headers()
        self.wfile.write(b'{"success":false}' if "full" in wanted and cells < int(wanted[5:]) else b'{"success": true}')

    def log_message(self, *_: object) -> None:
        pass


ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
