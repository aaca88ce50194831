#!/usr/bin/env bash
# Makes a folder that holds MIGraphX with the C library that it was built for, out of Debian's packages: for
# machines without ROCm. Target `ref` only (the GPU's libraries are left out). Needs apt and dpkg, not root.
#
#   migraphx-root.sh FOLDER        29 MB to fetch, 85 MB in the end, seconds
#
# ROCSERVE_DEBIAN_MIRROR          the URL of another Debian mirror than this system's own
set -euo pipefail

fail() {
  echo "migraphx-root: $*" >&2
  exit 1
}

packages="libc6 libgcc-s1 libstdc++6 libprotobuf32t64 libsqlite3-0 zlib1g migraphx-tools libmigraphx-c3"
libraries=usr/lib/x86_64-linux-gnu

[ $# = 1 ] || fail "say where the folder is to be: migraphx-root.sh FOLDER"
parent=$(cd "$(dirname "$1")" 2>/dev/null && pwd) || fail "there is no folder $(dirname "$1") to make $1 in"
root=$parent/$(basename "$1")
work=$root.part

# What a finished folder was made by; another version of this script makes it anew.
recipe=$(cksum <"$0")
is_made() { [ "$(cat "$root/.made-by" 2>/dev/null)" = "$recipe" ]; }
if is_made; then exit 0; fi

for command in apt-get apt-cache dpkg dpkg-deb flock; do
  command -v "$command" >/dev/null || fail "$command is missing: only a Debian or Ubuntu system can make this folder"
done
architecture=$(dpkg --print-architecture)
[ "$architecture" = amd64 ] || fail "this machine is $architecture, the folder is for amd64 only"

keyring=
for candidate in /usr/share/keyrings/debian-archive-keyring.{pgp,gpg}; do
  [ -r "$candidate" ] && keyring=$candidate && break
done
[ -n "$keyring" ] || fail "Debian's keys are missing: install the package debian-archive-keyring"

# The mirror that this system is told to use, where it is a Debian.
system_mirror() {
  cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
    grep -v '^ *#' | grep -oE 'https?://[^ ]+/debian/?( |$)' | head -n 1 | tr -d ' '
}
mirror=${ROCSERVE_DEBIAN_MIRROR:-$(system_mirror || true)}
[ -n "$mirror" ] || fail "this system knows no Debian mirror: name one in ROCSERVE_DEBIAN_MIRROR"

# Two that are started at once make it once; what an interrupted one left is thrown away.
exec 9>"$root.lock"
flock 9
if is_made; then exit 0; fi
rm -rf "$work"
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM HUP
mkdir -p "$work"/apt/{lists/partial,archives/partial} "$work/packages" "$work/root"

: >"$work/apt/status"
echo "deb [signed-by=$keyring] $mirror sid main" >"$work/apt/sources.list"
cat >"$work/apt/conf" <<END
Dir::State "$work/apt";
Dir::State::status "$work/apt/status";
Dir::Cache "$work/apt";
Dir::Etc::sourcelist "$work/apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
Acquire::Retries "3";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
END
export APT_CONFIG=$work/apt/conf

# `apt-get update` is content when nothing can be reached; whether there is an index tells.
echo "migraphx-root: fetching MIGraphX from $mirror (sid)"
apt-get update -qq >"$work/log" 2>&1 || true
apt-cache show libmigraphx-c3 >/dev/null 2>&1 || {
  tail -n 5 "$work/log" >&2
  fail "no packages from $mirror (is there a network? ROCSERVE_DEBIAN_MIRROR names another mirror)"
}
# shellcheck disable=SC2086
(cd "$work/packages" && apt-get download -qq $packages) >"$work/log" 2>&1 || {
  tail -n 5 "$work/log" >&2
  fail "packages could not be fetched from $mirror"
}

for package in "$work"/packages/*.deb; do dpkg-deb --extract "$package" "$work/root"; done
rm -f "$work/root/$libraries"/migraphx/lib/libmigraphx_{device,gpu}*
# Debian moves on: say here, not in some test, when its packages have ceased to fit each other.
loader=$work/root/$libraries/ld-linux-x86-64.so.2
"$loader" --library-path "$work/root/$libraries:$work/root/$libraries/migraphx/lib" \
  --list "$work/root/$libraries/libmigraphx_c.so.3" >"$work/log" 2>&1 || {
  tail -n 5 "$work/log" >&2
  fail "the packages do not fit each other: libmigraphx_c.so.3 cannot be loaded"
}

echo "$recipe" >"$work/root/.made-by"
rm -rf "$root"
mv "$work/root" "$root"
version=$(dpkg-deb --field "$work"/packages/libmigraphx-c3_*.deb Version)
echo "migraphx-root: MIGraphX $version is in $root"
