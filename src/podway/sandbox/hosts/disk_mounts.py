"""Mounts data disks for a confined machine, whose own root may mount nothing that lies on a block device.

A plain script (`python -I disk_mounts.py PID`), one for each machine that has disks. It enters the machine's outer mount namespace
and answers the machine's `mount` and `umount` (the scripts below, found before the real ones) on a socket: only root's requests,
only for block devices that the machine has nodes of, which are those that were attached to it.
"""

import ctypes
import getopt
import json
import os
import socket
import stat
import struct
import sys

SOCKET = "/run/pw/disks"
FILE_SYSTEMS = ("ext4", "xfs", "btrfs")
# linux/mount.h
FLAGS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048}
IGNORED = {"defaults", "rw", "auto", "user", "nofail"}
NODEV, MNT_DETACH = 4, 2
# What the machine runs; anything that is not about a block device goes to the real command.
MOUNT = """#!/usr/bin/env python3
import json, os, socket, stat, sys
verb, words = os.path.basename(sys.argv[0]), sys.argv[1:]
def block(path):
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except OSError:
        return False
with open("/proc/self/mounts") as file:
    on = {line.split()[1] for line in file if block(line.split()[0])}
about = [word for word in words if block(word) or (verb == "umount" and os.path.realpath(word) in on)]
if not about:
    os.execv("/usr/bin/" + verb, sys.argv)
with socket.socket(socket.AF_UNIX) as link:
    link.connect("/run/pw/disks")
    link.sendall(json.dumps([verb, os.getcwd(), *words]).encode() + b"\\n")
    said = json.loads(link.makefile().readline())
if said:
    sys.exit(verb + ": " + said)
"""
_libc = ctypes.CDLL(None, use_errno=True)


def mount(words: list[str], mounted: dict[str, str]) -> str:
    """`mount [-t TYPE] [-o OPTIONS] DEVICE DIRECTORY`; what went wrong, if anything."""
    given, rest = getopt.gnu_getopt(words, "t:o:rwv")
    if len(rest) != 2 or not stat.S_ISBLK(os.stat(rest[0]).st_mode):
        return "a block device and a directory are expected"
    names = [name for key, value in given if key == "-o" for name in value.split(",")]
    names += ["ro" for key, _ in given if key == "-r"]
    flags = NODEV | sum(FLAGS[name] for name in set(names) & set(FLAGS))
    data = ",".join(name for name in names if name not in FLAGS and name not in IGNORED)
    place = os.path.realpath(rest[1])
    for kind in [value for key, value in given if key == "-t" and value in FILE_SYSTEMS] or FILE_SYSTEMS:
        arguments = [os.fsencode(word) for word in (rest[0], place, kind)]
        if _libc.mount(*arguments, ctypes.c_ulong(flags), data.encode()) == 0:
            mounted[place] = rest[0]
            return ""
    return f"{rest[0]} at {rest[1]}: {os.strerror(ctypes.get_errno())}"


def umount(words: list[str], mounted: dict[str, str]) -> str:
    """`umount [-l] DEVICE|DIRECTORY`, of what was mounted here and of nothing else."""
    given, rest = getopt.gnu_getopt(words, "lfv")
    for one in rest:
        places = [place for place, device in mounted.items() if one == device or os.path.realpath(one) == place]
        if not places:
            return f"{one}: not mounted"
        if _libc.umount2(os.fsencode(places[-1]), MNT_DETACH if ("-l", "") in given else 0) < 0:
            return f"{one}: {os.strerror(ctypes.get_errno())}"
        del mounted[places[-1]]
    return ""


def answer(link: socket.socket, mounted: dict[str, str]) -> str:
    """Do what one request asks for; what went wrong, if anything."""
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    verb, folder, *words = json.loads(link.makefile().readline())
    if user != 0:
        return "only root can do that"
    os.chdir(folder)
    try:
        return (mount if verb == "mount" else umount)(words, mounted)
    except (OSError, getopt.GetoptError) as error:
        return str(error)
    finally:
        os.chdir("/")


def main(pid: str) -> None:
    """Serve until killed."""
    with open(f"/proc/{pid}/ns/mnt") as namespace:
        if _libc.setns(namespace.fileno(), 0) < 0:
            sys.exit(os.strerror(ctypes.get_errno()))
    mounted: dict[str, str] = {}  # where, and which device
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET)
        os.chmod(SOCKET, 0o600)
        listener.listen()
        print("ready", flush=True)
        while True:
            link, _ = listener.accept()
            with link:
                link.settimeout(10)
                try:
                    said = answer(link, mounted)
                    link.sendall(json.dumps(said).encode() + b"\n")
                except (OSError, ValueError, TypeError) as error:
                    print(f"a request to mount failed: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
