#!/bin/sh
# The real servers that the tests run against and that no wheel holds: Postgres 15 of Debian 12, MariaDB, MySQL, MongoDB, Kafka.
# As root: installed with apt, without the cluster that Debian's package makes. Otherwise: unpacked into a cache directory.
set -eu
sh "$(dirname "$0")/install_mariadb.sh"
sh "$(dirname "$0")/install_mysql.sh" || echo "The tests on MySQL will be skipped." >&2
sh "$(dirname "$0")/install_mongodb.sh" || echo "The tests on MongoDB will be skipped." >&2
sh "$(dirname "$0")/install_kafka.sh"
MAJOR=15
PACKAGE=postgresql-$MAJOR
BIN=usr/lib/postgresql/$MAJOR/bin
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/headwater/servers/$PACKAGE

if [ -n "${HEADWATER_POSTGRES_15:-}" ] || [ -x "/$BIN/postgres" ] || [ -x "$CACHE/$BIN/postgres" ]; then
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  echo "The tests need Postgres $MAJOR: install it, then set HEADWATER_POSTGRES_15 to its bin directory." >&2
  exit 1
fi
echo "Installing $PACKAGE for the tests …"
if [ "$(id -u)" = 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  [ -n "$(apt-cache madison "$PACKAGE" 2>/dev/null)" ] || apt-get update -qq
  apt-get install -y -qq --no-install-recommends postgresql-common >/dev/null
  config=/etc/postgresql-common/createcluster.conf
  if [ ! -d "/etc/postgresql/$MAJOR" ] && ! grep -q '^create_main_cluster *= *false' "$config" 2>/dev/null; then
    touch "$config" && cp "$config" "$config.headwater"
    echo 'create_main_cluster = false' >>"$config"
    trap 'mv "$config.headwater" "$config"' EXIT
  fi
  apt-get install -y -qq --no-install-recommends "$PACKAGE" >/dev/null
else
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  # what of the server's dependencies a bare Debian may lack; JIT (libllvm) is not needed
  for name in "$PACKAGE" libpq5 libicu72 libxml2 libxslt1.1 libldap-2.5-0 libsasl2-2; do
    (cd "$work" && apt-get download -qq "$name")
  done
  mkdir -p "$CACHE.new"
  for deb in "$work"/*.deb; do
    dpkg-deb -x "$deb" "$CACHE.new"
  done
  rm -rf "$CACHE" && mv "$CACHE.new" "$CACHE"
fi
