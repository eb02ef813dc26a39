"""What a host runs to have a bucket: one bash script for each mount. Pure; golden-tested.

    MOUNT          gcsfuse: files are objects, written when they are closed
    MOUNT_CACHED   rclone: files are kept on the host's disk and written back behind the job's back; `flushed` waits for that
    COPY           gcloud: the objects as plain files, by hosts that have an identity of their own

A mount script runs in the foreground for as long as the mount lasts, as an agent's job of its own: the agent keeps its output, ends it
with the cluster, and starts it once however often it is asked to. It says MOUNTED when the bucket can be listed, and unmounts when it
is told to end. What it leaves for whoever cleans up after a kill is in ~/.podway/mounts/ID: the target, and the directories it made.

Nothing secret is in a script: the tools find the identity of the machine they run on by themselves.
"""

import hashlib
import shlex
from typing import Literal

import msgspec

from podway.errors import UserError
from podway.storage.address import Address, parse
from podway.task.task import Bucket

MOUNTED = "PODWAY-MOUNTED"
WORKDIR = "~/sky_workdir"
# Defaults of the write-back cache where the task does not say: small enough for the boot disk of a TPU VM (100 GB).
CACHE_DEFAULTS = {"vfs_cache_max_size": "10G", "vfs_write_back": "1s", "dir_cache_time": "10s", "transfers": "8"}


class HostMount(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket at one place of every host. `endpoint` is another server than Google's, which asks for no login."""

    source: Bucket
    target: str
    endpoint: str | None = None

    @property
    def address(self) -> Address:
        return parse(self.source.uri)

    @property
    def id(self) -> str:
        """The same for the same mount, so that it is started once."""
        text = msgspec.json.encode([self.source, self.target, self.endpoint])
        return hashlib.sha256(text).hexdigest()[:12]

    @property
    def key(self) -> str:
        """The agent's job that is this mount."""
        return f"mount-{self.id}"


def script(mount: HostMount) -> str:
    """What brings this bucket to a host."""
    kind: dict[Literal["COPY", "MOUNT", "MOUNT_CACHED"], str] = {
        "COPY": _copy(mount),
        "MOUNT": _PLACE + _GCSFUSE + _mounting(_gcsfuse(mount)),
        "MOUNT_CACHED": _PLACE + _RCLONE + _mounting(_rclone(mount)),
    }
    return _head(mount) + kind[mount.source.mode]


def flushed(mount: HostMount, seconds: int) -> str:
    """Ends when everything that was written to a cached mount is in the bucket; 1 if it is not after so long."""
    return (
        _head(mount)
        + f"""meta=$state/cache/vfsMeta
unwritten() {{ grep -rlE '"Dirty": ?true' "$meta" 2>/dev/null; find "$meta" -type f -empty 2>/dev/null; }}
quiet=0  # thrice: a file that was closed a moment ago, or whose record is being written, is seen by the next look
while [ $quiet -lt 3 ]; do
  if [ -z "$(unwritten)" ]; then quiet=$((quiet + 1)); else quiet=0; fi
  [ $SECONDS -lt {seconds} ] || {{ unwritten | sed "s|^$meta/|not yet written: |"; exit 1; }}
  sleep 0.2
done
"""
    )


def _head(mount: HostMount) -> str:
    return f"""set -u
target={path(mount.target)}
state=$HOME/.podway/mounts/{mount.id}
fail() {{ echo "podway: $1"; exit 1; }}
as_root() {{ if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }}
"""


def path(target: str) -> str:
    """A target as bash reads it; a relative one lies in the working directory."""
    if not target.startswith(("/", "~")):
        target = f"{WORKDIR}/{target}"
    if target.startswith("~/"):
        return '"$HOME"/' + shlex.quote(target[2:])
    return shlex.quote(target)


_PLACE = """[ -e /dev/fuse ] || fail "this host has no /dev/fuse, so nothing can be mounted on it; use mode: COPY"
# As the fuse3 package's own rule for udev has it, which a host without udev lacks.
[ -w /dev/fuse ] || as_root chmod a+rw /dev/fuse || fail "$(id -un) may not open /dev/fuse on this host"
mkdir -p "$state" && chmod 700 "$state"
fusermount3 -uz "$target" 2>/dev/null  # what a killed one left
made=; at=$target
while [ ! -d "$at" ]; do made="$made$at
"; at=$(dirname "$at"); done
printf %s "$made" >> "$state/made"
printf '%s\\n' "$target" > "$state/target"
mkdir -p "$target" 2>/dev/null || { as_root mkdir -p "$target" && as_root chown "$(id -u):$(id -g)" "$target"; } \\
  || fail "$target cannot be made"
[ -z "$(ls -A "$target")" ] || fail "$target is not empty, and what is in it would be hidden; choose another place"
"""
# Debian's and Ubuntu's own package.
_RCLONE = """command -v rclone >/dev/null && command -v fusermount3 >/dev/null \\
  || as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq rclone fuse3 >"$state/install.log" 2>&1 \\
  || { as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq rclone fuse3; } \\
     >>"$state/install.log" 2>&1 \\
  || fail "rclone is not on this host and cannot be installed: $(tail -n 1 "$state/install.log")"
"""
# From Google's own repository: cloud.google.com/storage/docs/cloud-storage-fuse/install
_GCSFUSE = """if ! command -v gcsfuse >/dev/null; then
  { . /etc/os-release
    curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg | as_root tee /usr/share/keyrings/cloud.google.asc >/dev/null
    echo "deb [signed-by=/usr/share/keyrings/cloud.google.asc] https://packages.cloud.google.com/apt gcsfuse-$VERSION_CODENAME main" \\
      | as_root tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
    as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq gcsfuse
  } >"$state/install.log" 2>&1 || fail "gcsfuse is not on this host and cannot be installed: $(tail -n 1 "$state/install.log")"
fi
"""


def _mounting(command: str) -> str:
    return f"""SECONDS=0
{command} &
daemon=$!
end() {{ fusermount3 -u "$target" 2>/dev/null || fusermount3 -uz "$target" 2>/dev/null; wait "$daemon"; exit 0; }}
trap end TERM INT
until mountpoint -q "$target"; do
  kill -0 "$daemon" 2>/dev/null || {{ wait "$daemon"; code=$?; fail "the mount of $target ended with code $code"; }}
  [ $SECONDS -lt 60 ] || {{ kill "$daemon"; fail "$target was not mounted within 60 s"; }}
  sleep 0.1
done
ls "$target" >/dev/null || {{ fusermount3 -uz "$target"; fail "$target is mounted but cannot be listed"; }}
echo {MOUNTED}
wait "$daemon"
"""


def _rclone(mount: HostMount) -> str:
    address = mount.address
    remote = f":gcs:{address.bucket}/{address.prefix}".rstrip("/")
    words = ["rclone", "mount", remote, "--config", "/dev/null", "--vfs-cache-mode", "full"]
    tuning = CACHE_DEFAULTS | {key: value for key, value in mount.source.options.items() if key != "mount_options"}
    words += [word for key, value in sorted(tuning.items()) for word in (f"--{key.replace('_', '-')}", value)]
    # Buckets of today have no permissions for single objects; and that the bucket is there was seen before.
    words += ["--gcs-bucket-policy-only", "--gcs-no-check-bucket"]
    words += ["--read-only"] if mount.source.read_only else []
    words += ["--gcs-endpoint", f"{mount.endpoint}/storage/v1/", "--gcs-anonymous"] if mount.endpoint else []
    words += _more(mount)
    return shlex.join(words) + ' --cache-dir "$state/cache" "$target"'


def _gcsfuse(mount: HostMount) -> str:
    address = mount.address
    # Folders that no object stands for are shown, as people expect of a path such as data/train/0.txt.
    words = ["gcsfuse", "--foreground", "--implicit-dirs"]
    words += ["--only-dir", address.prefix] if address.prefix else []
    words += ["-o", "ro"] if mount.source.read_only else []
    words += ["--custom-endpoint", f"{mount.endpoint}/storage/v1/", "--anonymous-access"] if mount.endpoint else []
    words += _more(mount)
    return f'{shlex.join(words)} {shlex.quote(address.bucket)} "$target"'


def _more(mount: HostMount) -> list[str]:
    """What the task adds to the tool's arguments."""
    text = mount.source.options.get("mount_options", "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(
            f"mount_options of {mount.target}: {text!r} cannot be taken apart: {error}", "close its quotes"
        ) from None


def _copy(mount: HostMount) -> str:
    uri = shlex.quote(str(mount.address))
    endpoint = f"export CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE={mount.endpoint}/storage/v1/" if mount.endpoint else ""
    anonymous = '\n[ -n "${CLOUDSDK_AUTH_ACCESS_TOKEN_FILE:-}" ] || export CLOUDSDK_AUTH_DISABLE_CREDENTIALS=true\n'
    endpoint += anonymous if mount.endpoint else ""
    return f"""{endpoint}command -v gcloud >/dev/null || fail "gcloud is not on this host; use an image that has it, or mode: MOUNT_CACHED"
mkdir -p "$(dirname "$target")" || fail "$target cannot be made"
if gcloud storage objects describe {uri} >/dev/null 2>&1; then exec gcloud --quiet storage cp {uri} "$target"; fi
mkdir -p "$target" && exec gcloud --quiet storage rsync --recursive {uri} "$target"
"""
