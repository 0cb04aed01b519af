#!/usr/bin/env bash
# Show the rendered site to this machine's own browser: tools/serve.sh PORT. Takes the next free port where PORT is in use.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -f _build/html/index.html ]; then
    printf 'error: there is no rendered site in _build/html\nremedy: make site\n' >&2
    exit 1
fi
exec "$( [ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)" - "${1:-8899}" <<'PYTHON'
import functools
import http.server
import sys

HOST = "127.0.0.1"
try:
    first = int(sys.argv[1])
    if not 0 < first < 65536:
        raise ValueError
except ValueError:
    sys.exit(f"error: {sys.argv[1]!r} is not a port\nremedy: make serve PORT=8899")
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory="_build/html")
for port in range(first, min(first + 20, 65536)):
    try:
        site = http.server.ThreadingHTTPServer((HOST, port), handler)
        break
    except OSError:
        continue
else:
    sys.exit(f"error: ports {first} to {port} are all in use\nremedy: make serve PORT=another")
print(f"http://{HOST}:{port}  (Ctrl-C ends it)", flush=True)
try:
    site.serve_forever()
except KeyboardInterrupt:
    print()
PYTHON
