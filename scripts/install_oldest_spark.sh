#!/bin/sh
# The oldest PySpark that pipelines run on, for one test of it: unpacked into a cache directory, not installed.
# HEADWATER_NO_OLDEST_SPARK does without.
set -eu
VERSION=3.5.9
PY4J=0.10.9.7
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/headwater/pyspark-$VERSION
PIP=${PIP:-.venv/bin/pip}

if [ -n "${HEADWATER_NO_OLDEST_SPARK:-}" ] || [ -d "$CACHE" ]; then
  exit 0
fi
echo "Fetching PySpark $VERSION for the tests (300 MB) …"
rm -rf "$CACHE.new"
"$PIP" install --quiet --no-deps --no-compile --target "$CACHE.new" "pyspark==$VERSION" "py4j==$PY4J"
mv "$CACHE.new" "$CACHE"
