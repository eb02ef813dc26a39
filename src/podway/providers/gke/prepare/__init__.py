"""`podway gke prepare`: what a cluster needs before Podway can run tasks there, shown first and then applied.

releases.py   JobSet and Kueue as their projects publish them: which version, from where, and the checksum
wanted.py     Podway's own objects for the nodes that are there: flavors, queues, priority classes, accounts. Pure
changes.py    what of it differs from the cluster, found by a dry run of the cluster itself, and whether the caller may change it
applying.py   the changes, sent in order
"""
