#!/bin/sh
# MariaDB 10.11 of Debian 12 for the tests: unpacked into a cache directory, nothing is installed.
set -eu
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/headwater/servers/mariadb

if [ -n "${HEADWATER_MARIADB:-}" ] || { [ -x "$CACHE/usr/sbin/mariadbd" ] && [ -x "$CACHE/usr/bin/mariadb-binlog" ]; }; then
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  echo "The tests need MariaDB: unpack it, then set HEADWATER_MARIADB to the directory that has its usr/sbin/mariadbd." >&2
  exit 1
fi
echo "Unpacking mariadb-server for the tests …"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
[ "$(id -u)" != 0 ] || [ -n "$(apt-cache madison mariadb-server-core 2>/dev/null)" ] || apt-get update -qq
for name in mariadb-server mariadb-server-core mariadb-client mariadb-client-core mariadb-common libmariadb3 mysql-common liburing2 \
  libsnappy1v5 libaio1 libnuma1 libpmem1 libndctl6 libdaxctl1; do
  (cd "$work" && apt-get download -qq "$name" 2>/dev/null)
done
rm -rf "$CACHE.new" && mkdir -p "$CACHE.new"
for deb in "$work"/*.deb; do
  dpkg-deb -x "$deb" "$CACHE.new"
done
rm -rf "$CACHE" && mv "$CACHE.new" "$CACHE"
