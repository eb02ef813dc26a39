"""Machines to try Podway on: real sshd, real processes, nothing outside this machine."""
