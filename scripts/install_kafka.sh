#!/bin/sh
# The Kafka broker that the tests of the Kafka sink run: its jars from Maven Central, in a cache directory.
# HEADWATER_KAFKA names a directory with the jars of a broker of your own; HEADWATER_NO_KAFKA does without.
set -eu
VERSION=3.9.1
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/headwater/servers/kafka-$VERSION

if [ -n "${HEADWATER_NO_KAFKA:-}" ] || [ -n "${HEADWATER_KAFKA:-}" ] || [ -d "$CACHE" ]; then
  exit 0
fi
if ! command -v mvn >/dev/null || ! command -v java >/dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "The tests need a Kafka broker. Run: sudo apt-get install maven openjdk-17-jre-headless" >&2
    echo "Or set HEADWATER_NO_KAFKA=1: its tests are skipped then." >&2
    exit 1
  fi
  export DEBIAN_FRONTEND=noninteractive
  [ -n "$(apt-cache madison maven 2>/dev/null)" ] || apt-get update -qq
  apt-get install -y -qq --no-install-recommends maven openjdk-17-jre-headless >/dev/null
fi
echo "Fetching Kafka $VERSION for the tests …"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/pom.xml" <<POM
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>headwater</groupId>
  <artifactId>kafka-for-tests</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>$VERSION</version>
    </dependency>
    <dependency>
      <groupId>org.slf4j</groupId>
      <artifactId>slf4j-simple</artifactId>
      <version>1.7.36</version>
    </dependency>
  </dependencies>
</project>
POM
rm -rf "$CACHE.new" && mkdir -p "$CACHE.new"
mvn -q -B -f "$work/pom.xml" dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory="$CACHE.new" >&2
mv "$CACHE.new" "$CACHE"
