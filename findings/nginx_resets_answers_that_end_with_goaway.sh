#!/usr/bin/env bash
# nginx 1.22.1 (Debian 12; 1.30.6 does the same) as a gRPC proxy: an upstream server that answers a call completely, with its
# trailers and the end of the stream, adds GOAWAY in the same write and closes the connection, has done what HTTP/2 allows. Of
# such answers nginx passes on a part, and resets the rest towards the client ("upstream prematurely closed connection
# while sending to client"), so that clients see failed calls whose work was done. If the upstream keeps the connection open
# for a moment after GOAWAY, all answers arrive.
# Installs Debian's nginx into the temporary folder.
# Seen on 2026-11-29 (with closing at once, 132 of 300 were reset):
#   lingers: all answered
#   closes at once: some reset
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chmod 755 "$folder"
(cd "$folder" && apt-get download -qq nginx 2>/dev/null && dpkg -x nginx_*.deb .)
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check h2==4.4.1
cat >"$folder/upstream.py" <<'PYTHON'
import socket
import sys
import threading
import time

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded


def serve(connection: socket.socket, pause: float) -> None:
    http = H2Connection(H2Configuration(client_side=False))
    http.initiate_connection()
    connection.sendall(http.data_to_send())
    while data := connection.recv(65536):
        for event in http.receive_data(data):
            if isinstance(event, StreamEnded):
                http.send_headers(event.stream_id, [(":status", "200"), ("content-type", "application/grpc")])
                http.send_data(event.stream_id, b"\0\0\0\0\5hello")
                http.send_headers(event.stream_id, [("grpc-status", "0")], end_stream=True)
                http.close_connection()
                connection.sendall(http.data_to_send())
                if pause:
                    time.sleep(pause)
                connection.close()
                return
        connection.sendall(http.data_to_send())


listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0], float(sys.argv[1])), daemon=True).start()
PYTHON
cat >"$folder/ask.py" <<'PYTHON'
import socket
import subprocess
import sys
import time
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded, StreamReset

CALLS = 300
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/service/method"),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
CONFIGURATION = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors; events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
    uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
    server {{ listen 127.0.0.1:{port} http2; location / {{ grpc_pass grpc://127.0.0.1:{upstream}; }} }}
}}
"""


def ask(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        http = H2Connection(H2Configuration(client_side=True))
        http.initiate_connection()
        http.send_headers(1, HEADERS)
        http.send_data(1, b"\0\0\0\0\0", end_stream=True)
        connection.sendall(http.data_to_send())
        while data := connection.recv(65536):
            for event in http.receive_data(data):
                if isinstance(event, StreamReset):
                    return False
                if isinstance(event, StreamEnded):
                    return True
    return False


root = Path(sys.argv[1])
for name, pause in (("lingers", "0.05"), ("closes at once", "0")):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, root / "upstream.py", pause]
    folder = root / f"nginx{pause}"
    (folder / "logs").mkdir(parents=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        text = CONFIGURATION.format(folder=folder, port=port, upstream=int(server.stdout.readline()))
        (folder / "configuration").write_text(text)
        words = [root / "usr/sbin/nginx", "-p", folder, "-c", folder / "configuration", "-e", folder / "start"]
        with subprocess.Popen(words) as nginx:
            time.sleep(1)
            answered = sum(ask(port) for _ in range(CALLS))
            nginx.kill()
        server.kill()
    print(f"{name}: {'all answered' if answered == CALLS else 'some reset'}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/ask.py" "$folder") - <<'SEEN'
lingers: all answered
closes at once: some reset
SEEN
