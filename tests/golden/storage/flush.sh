set -u
target="$HOME"/ckpt
state=$HOME/.podway/mounts/17b8ac57bc00
fail() { echo "podway: $1"; exit 1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
meta=$state/cache/vfsMeta
unwritten() { grep -rlE '"Dirty": ?true' "$meta" 2>/dev/null; find "$meta" -type f -empty 2>/dev/null; }
quiet=0  # thrice: a file that was closed a moment ago, or whose record is being written, is seen by the next look
while [ $quiet -lt 3 ]; do
  if [ -z "$(unwritten)" ]; then quiet=$((quiet + 1)); else quiet=0; fi
  [ $SECONDS -lt 900 ] || { unwritten | sed "s|^$meta/|not yet written: |"; exit 1; }
  sleep 0.2
done
