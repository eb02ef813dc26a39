set -u
target="$HOME"/data
state=$HOME/.podway/mounts/c9274c4eb13b
fail() { echo "podway: $1"; exit 1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
command -v gcloud >/dev/null || fail "gcloud is not on this host; use an image that has it, or mode: MOUNT_CACHED"
mkdir -p "$(dirname "$target")" || fail "$target cannot be made"
if gcloud storage objects describe 'gs://data/it'"'"'s here' >/dev/null 2>&1; then exec gcloud --quiet storage cp 'gs://data/it'"'"'s here' "$target"; fi
mkdir -p "$target" && exec gcloud --quiet storage rsync --recursive 'gs://data/it'"'"'s here' "$target"
