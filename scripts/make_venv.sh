#!/bin/sh
# Make (or mend) the virtual environment: the exact versions of constraints.txt, the package itself editable.
# A fresh Debian has python3 without ensurepip: install its venv package then, when we may.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "headwater needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version). Try: make install PYTHON=python3.11" >&2
  exit 1
fi
if [ ! -x "$VENV/bin/pip" ]; then
  rm -rf "$VENV"
  if ! "$PYTHON" -c 'import ensurepip' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null
    else
      echo "$PYTHON cannot make virtual environments. Run: sudo apt-get install python3-venv" >&2
      exit 1
    fi
  fi
  "$PYTHON" -m venv "$VENV"
  "$VENV/bin/pip" install --quiet --upgrade 'pip>=25.1'
fi
echo "Installing headwater and its tools into $VENV (the first time takes a minute or two) …"
"$VENV/bin/pip" install --quiet --constraint constraints.txt --editable '.[spark,postgres,mysql,mongodb,sqlserver,delta,kafka,iceberg,objectstore]' --group dev
