"""The one system call Python has no name for."""

from __future__ import annotations

import ctypes
import os

_PR_SET_NAME = 15  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h, Linux 3.4


def become(name: str) -> None:
    """Take in the orphans among one's descendants (a child subreaper), and show as `name` in process lists.

    The name also keeps the widespread `pkill python` in a user's script from hitting the agent and its runners.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER): " + os.strerror(ctypes.get_errno()))
    text = ctypes.create_string_buffer(name.encode("ascii")[:15])
    prctl(_PR_SET_NAME, ctypes.addressof(text), 0, 0, 0)
