#!/bin/sh
# Debian's driver for Spark's JDBC reader, which benchmarks/backfill.py and mysql.py measure against. Prints its path.
# $1: postgres (the default) or mariadb.
# As root: installed with apt. Otherwise: unpacked into a cache directory. HEADWATER_JDBC_JAR names one of your own.
set -eu
case "${1:-postgres}" in
  mariadb) PACKAGE=libmariadb-java JAR=usr/share/java/mariadb-java-client.jar ;;
  *) PACKAGE=libpostgresql-jdbc-java JAR=usr/share/java/postgresql.jar ;;
esac
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/headwater/servers/$PACKAGE

for found in "${HEADWATER_JDBC_JAR:-}" "/$JAR" "$CACHE/$JAR"; do
  if [ -f "$found" ]; then
    echo "$found"
    exit 0
  fi
done
if ! command -v apt-get >/dev/null; then
  echo "The benchmark needs a JDBC driver: set HEADWATER_JDBC_JAR to its jar." >&2
  exit 1
fi
echo "Installing $PACKAGE for the benchmark …" >&2
if [ "$(id -u)" = 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  [ -n "$(apt-cache madison "$PACKAGE" 2>/dev/null)" ] || apt-get update -qq >&2
  apt-get install -y -qq --no-install-recommends "$PACKAGE" >/dev/null
  echo "/$JAR"
else
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  (cd "$work" && apt-get download -qq "$PACKAGE" >&2)
  mkdir -p "$CACHE.new"
  dpkg-deb -x "$work"/*.deb "$CACHE.new"
  rm -rf "$CACHE" && mv "$CACHE.new" "$CACHE"
  echo "$CACHE/$JAR"
fi
