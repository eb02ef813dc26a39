set -u
target=/data
state=$HOME/.podway/mounts/efc5ea90f131
fail() { echo "podway: $1"; exit 1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
[ -e /dev/fuse ] || fail "this host has no /dev/fuse, so nothing can be mounted on it; use mode: COPY"
# As the fuse3 package's own rule for udev has it, which a host without udev lacks.
[ -w /dev/fuse ] || as_root chmod a+rw /dev/fuse || fail "$(id -un) may not open /dev/fuse on this host"
mkdir -p "$state" && chmod 700 "$state"
fusermount3 -uz "$target" 2>/dev/null  # what a killed one left
made=; at=$target
while [ ! -d "$at" ]; do made="$made$at
"; at=$(dirname "$at"); done
printf %s "$made" >> "$state/made"
printf '%s\n' "$target" > "$state/target"
mkdir -p "$target" 2>/dev/null || { as_root mkdir -p "$target" && as_root chown "$(id -u):$(id -g)" "$target"; } \
  || fail "$target cannot be made"
[ -z "$(ls -A "$target")" ] || fail "$target is not empty, and what is in it would be hidden; choose another place"
if ! command -v gcsfuse >/dev/null; then
  { . /etc/os-release
    curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg | as_root tee /usr/share/keyrings/cloud.google.asc >/dev/null
    echo "deb [signed-by=/usr/share/keyrings/cloud.google.asc] https://packages.cloud.google.com/apt gcsfuse-$VERSION_CODENAME main" \
      | as_root tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
    as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq gcsfuse
  } >"$state/install.log" 2>&1 || fail "gcsfuse is not on this host and cannot be installed: $(tail -n 1 "$state/install.log")"
fi
SECONDS=0
gcsfuse --foreground --implicit-dirs data "$target" &
daemon=$!
end() { fusermount3 -u "$target" 2>/dev/null || fusermount3 -uz "$target" 2>/dev/null; wait "$daemon"; exit 0; }
trap end TERM INT
until mountpoint -q "$target"; do
  kill -0 "$daemon" 2>/dev/null || { wait "$daemon"; code=$?; fail "the mount of $target ended with code $code"; }
  [ $SECONDS -lt 60 ] || { kill "$daemon"; fail "$target was not mounted within 60 s"; }
  sleep 0.1
done
ls "$target" >/dev/null || { fusermount3 -uz "$target"; fail "$target is mounted but cannot be listed"; }
echo PODWAY-MOUNTED
wait "$daemon"
