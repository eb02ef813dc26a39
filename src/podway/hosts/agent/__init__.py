"""The program that runs on every host of a slice: one stdlib-only zip file, any Python >= 3.8.

Flow: 1. `serve` listens on a unix socket in the host's home and answers requests (wire.py says how they look on the wire).
2. Each (job, phase) is run by a process of its own, `runner`, which outlives the agent. 3. What both know is on disk
(phase.py), so that either may be killed at any instant. 4. Everything here runs from the bundle that
`podway.hosts.bundle` packs; it imports nothing but the standard library, and little of that, to start quickly.
"""
