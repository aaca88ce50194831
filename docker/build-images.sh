#!/usr/bin/env bash
# Builds the images of the Dockerfiles and sends a request to a server in each, without a container engine and a registry:
# the base image is made from Debian's packages, with the name in the Dockerfiles. Needs root, buildah and mmdebstrap;
# `make images` calls it.
#
#   build-images.sh cpu rocm dev    builds the named images; rocm with MIGraphX's reference target
#
# The builds use this machine's pip settings (an index, certificates); no image keeps them.
set -euo pipefail

base=python:3.11-slim
mirror=${ROCSERVE_DEBIAN_MIRROR:-http://deb.debian.org/debian}

cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
export PYTHONPATH=$PWD/server:$PWD/tools:$PWD/clients
for command in buildah mmdebstrap; do
  command -v "$command" >/dev/null || { echo "images: $command is missing (apt-get install buildah mmdebstrap)"; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "images: only root can make the base"; exit 1; }

work=$(mktemp -d)
mkdir "$work"/{lower,upper,turn,merged}
# Overlays share the files of layers. Where they cannot be mounted, as inside of most containers, each layer is a copy.
driver=vfs
if mount -t overlay overlay -o "lowerdir=$work/lower,upperdir=$work/upper,workdir=$work/turn" "$work/merged" 2>/dev/null; then
  umount "$work/merged"
  driver=overlay
fi
# Without namespaces, so that it works inside of a container too.
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=$driver CONTAINERS_STORAGE_CONF=$work/storage.conf
printf '[storage]\ndriver = "%s"\nrunroot = "%s/run"\ngraphroot = "%s/images"\n' "$driver" "$work" "$work" >"$work/storage.conf"
server=
finish() {
  [ -z "$server" ] || kill -- -"$server" 2>/dev/null || true
  wait
  # What a step that failed has left mounted: nothing there may be removed through a mount.
  awk -v work="$work/" 'index($2, work) == 1 { print $2 }' /proc/mounts | sort -r | xargs -r umount --lazy
  rm -rf "$work"
}
trap finish EXIT

echo "images: making $base of Debian's packages"
container=$(buildah from scratch)
root=$(buildah mount "$container")
# Without what Debian's slim images leave out, too.
left_out=()
for folder in doc groff info lintian locale man; do left_out+=("--dpkgopt=path-exclude=/usr/share/$folder/*"); done
mmdebstrap --mode=root --variant=apt --include=ca-certificates,python3-pip,python3-venv "${left_out[@]}" \
  bookworm "$root" "$mirror" >"$work/log" 2>&1 || { tail -n 5 "$work/log"; exit 1; }
# In the real base image Python is not Debian's, pip may install into it, and its name is `python`.
ln -s python3 "$root/usr/bin/python"
buildah config --env PIP_BREAK_SYSTEM_PACKAGES=1 "$container"
buildah commit --quiet --rm "$container" "docker.io/library/$base" >/dev/null

# pip's settings in one file, and the files that the settings name.
{ echo "[global]"; "$python" -m pip config list | sed -nE "s/^[^=]*\.([a-z-]+)='(.*)'$/\1 = \2/p" | sort -u -t= -k1,1; } >"$work/pip.conf"
mounts=(--volume "$work/pip.conf:/etc/pip.conf:ro")
for path in /etc/ssl/certs/ca-certificates.crt $(grep -oE '(= |file://)/[^ ]+' "$work/pip.conf" | sed -E 's,^(= |file://),,; s,/simple$,,' | sort -u); do
  [ ! -e "$path" ] || mounts+=(--volume "$path:$path:ro")
done

build() {
  local name=$1
  shift
  echo "images: building $name"
  buildah build --pull-never --quiet "${mounts[@]}" --tag "$name" "$@" . >"$work/log" 2>&1 || { tail -n 20 "$work/log"; exit 1; }
}

# Runs the image's own command with a model whose result is known, sends a request over HTTP, and runs `rocserve doctor`.
try() {
  local name=$1 container port command
  container=$(buildah from --pull-never "$name")
  echo "images: rocserve doctor in $name"
  buildah run "$container" rocserve doctor | tee "$work/doctor"
  # As ONNX Runtime's StringNormalizer does.
  buildah run "$container" python3 -c "import locale; locale.setlocale(locale.LC_ALL, 'en_US.UTF-8')" \
    || { echo "images: $name lacks the locale en_US.UTF-8"; exit 1; }
  mkdir -p "$work/models/tiny/1"
  "$python" -c "import sys; from rocserve.verbs.doctor.trial import TINY_ONNX; sys.stdout.buffer.write(TINY_ONNX)" \
    >"$work/models/tiny/1/model.onnx"
  chmod 755 "$work"
  port=$("$python" -c "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])")
  mapfile -t command < <(buildah inspect --format '{{range .OCIv1.Config.Cmd}}{{println .}}{{end}}' "$name" | sed '/^$/d')
  echo "images: ${command[*]}"
  setsid buildah run --volume "$work/models:/models:ro" "$container" "${command[@]}" \
    --grpc-port="$port" --allow-http=false --allow-metrics=false >"$work/server.log" 2>&1 &
  server=$!
  "$python" - "$port" <<'END' || { cat "$work/server.log"; exit 1; }
import sys

import numpy as np
from rocserve_client import Client

from rocserve.verbs.doctor.trial import NETWORK

with Client(f"localhost:{sys.argv[1]}") as client:
    client.wait_until_ready(timeout=60, model="tiny")
    answer = client.infer("tiny", NETWORK.inputs)["y"]
assert np.abs(answer - NETWORK.answer).max() <= NETWORK.tolerance, (answer, NETWORK.answer)
print(f"images: the server answers {answer.ravel().tolist()}, which is right")
END
  kill -- -"$server"
  wait "$server" || true
  server=
  buildah rm "$container" >/dev/null
}

for image in "$@"; do
  case $image in
  cpu)
    build rocserve --file docker/Dockerfile
    try rocserve
    ;;
  rocm)
    build rocserve:rocm --file docker/Dockerfile.rocm --build-arg MIGRAPHX=reference
    try rocserve:rocm
    grep -qE 'MIGraphX on ref +works' "$work/doctor" || { echo "images: MIGraphX does not work in rocserve:rocm"; exit 1; }
    ;;
  dev)
    build rocserve:dev --file docker/Dockerfile.dev
    container=$(buildah from --pull-never rocserve:dev)
    buildah run "$container" .venv/bin/python -m pytest -q tests/unit/core
    ;;
  *)
    echo "images: there are cpu, rocm and dev"
    exit 1
    ;;
  esac
done
