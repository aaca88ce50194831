#!/usr/bin/env bash
# kserve-storage 0.21.0 (KServe's storage initialiser): the URI s3://store/models/m, without a slash at its end, is a prefix of
# names and not a folder. It also brings what lies under models/m2, with the prefix cut off: models/m2/model.onnx arrives as
# 2/model.onnx, which a server of model repositories takes for version 2 of the model m. With the slash only m arrives.
# Runs against moto's S3 server on this machine.
# Seen on 2026-11-29:
#   s3://store/models/m/ : 1/model.onnx from models/m/1/model.onnx
#   s3://store/models/m : 1/model.onnx from models/m/1/model.onnx, 2/model.onnx from models/m2/model.onnx
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'kserve-storage[s3]==0.21.0' 'moto[server]==5.2.5'
cat >"$folder/prefixes.py" <<'PYTHON'
import os
import sys
from pathlib import Path

import boto3
from kserve_storage import Storage
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
address = "http://{}:{}".format(*server.get_host_and_port())
os.environ.update(
    AWS_ENDPOINT_URL=address, AWS_ACCESS_KEY_ID="user", AWS_SECRET_ACCESS_KEY="word", AWS_DEFAULT_REGION="us-east-1"
)
store = boto3.client("s3")
store.create_bucket(Bucket="store")
for key in ("models/m/1/model.onnx", "models/m2/model.onnx"):
    store.put_object(Bucket="store", Key=key, Body=key.encode())
for number, uri in enumerate(("s3://store/models/m/", "s3://store/models/m")):
    folder = Path(sys.argv[1]) / str(number)
    folder.mkdir()
    Storage.download(uri, str(folder))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    print(uri, ":", ", ".join(f"{path.relative_to(folder)} from {path.read_text()}" for path in files))
server.stop()
PYTHON
diff <("$folder/venv/bin/python" "$folder/prefixes.py" "$folder" 2>/dev/null) - <<'SEEN'
s3://store/models/m/ : 1/model.onnx from models/m/1/model.onnx
s3://store/models/m : 1/model.onnx from models/m/1/model.onnx, 2/model.onnx from models/m2/model.onnx
SEEN
