#!/bin/sh
# MySQL 9.7 of Debian's unstable distribution for the tests: unpacked into a cache directory with the libraries that it
# needs, nothing is installed. It runs with its own loader, because its C library is newer than that of a stable Debian.
set -eu
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/headwater/servers/mysql
MIRROR=${HEADWATER_DEBIAN_MIRROR:-http://deb.debian.org/debian}

if [ -n "${HEADWATER_MYSQL:-}" ] || [ -x "$CACHE/usr/sbin/mysqld" ]; then
  exit 0
fi
if ! command -v apt-get >/dev/null || [ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ]; then
  echo "The tests need MySQL: unpack it, then set HEADWATER_MYSQL to the directory that has its usr/sbin/mysqld." >&2
  exit 1
fi
echo "Unpacking mysql-server-core for the tests …"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
# apt's own settings of this machine (a proxy) hold; its lists and its sources do not
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/etc/preferences.d" "$work/debs"
: >"$work/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $MIRROR sid main" >"$work/sources.list"
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
# whatever of these the distribution has: library packages change their names with their versions
needed=$(apt-cache -c "$work/apt.conf" depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
  --no-replaces --no-enhances mysql-server-core | sed -n 's/^\([a-z0-9][a-z0-9.+-]*\)$/\1/p' |
  grep -E '^(mysql-server-core|lib.*|zlib1g)$' | grep -v '^libperl' | sort -u)
(cd "$work/debs" && apt-get -c "$work/apt.conf" download -qq $needed)
rm -rf "$CACHE.new" && mkdir -p "$CACHE.new"
for deb in "$work"/debs/*.deb; do
  dpkg-deb -x "$deb" "$CACHE.new"
done
rm -rf "$CACHE" && mv "$CACHE.new" "$CACHE"
