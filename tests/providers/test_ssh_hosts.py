"""Machines made for tests are gone afterwards, whatever happens."""

import subprocess
import sys
from pathlib import Path

import pytest

from podway.sandbox.hosts import make_hosts, why_no_hosts
from podway.sandbox.hosts.netns import why_no_namespaces


def test_making_hosts_leaves_nothing_behind() -> None:
    """Also when the block ends badly."""
    why_not = why_no_hosts() or why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    with pytest.raises(ZeroDivisionError), make_hosts(2, separate=True) as hosts:
        number = hosts.hosts[0].address.split(".")[2]
        assert Path(f"/run/netns/pw{number}h1").exists()
        raise ZeroDivisionError
    assert not Path(f"/run/netns/pw{number}h1").exists()
    assert not Path(f"/sys/class/net/pwb{number}").exists()
    assert not Path(f"/tmp/podway-netns/{number}").exists()


def test_hosts_of_a_killed_maker_are_removed_by_the_next() -> None:
    why_not = why_no_hosts() or why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    code = (
        "import os, signal; from podway.sandbox.hosts import make_hosts\n"
        "with make_hosts(2, separate=True) as made: print(made.hosts[0].address, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    number = shown.stdout.split(".")[2]
    with make_hosts(1, separate=True) as made:
        taken = made.hosts[0].address.split(".")[2]
        assert not Path(f"/run/netns/pw{number}h1").exists()
    assert not Path(f"/sys/class/net/pwb{taken}").exists()
