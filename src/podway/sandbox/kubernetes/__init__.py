"""A small Kubernetes in this process, and nodes that run pods as processes.

objects.py      what is stored, with versions
server.py       the HTTP API over it: paths, selectors, patches, errors as the real server words them
schemas.py      what is sent, held against the schema of JobSet's own CRD
server_side_apply.py  what an applied object becomes
admission.py    what the real server and JobSet's webhooks refuse besides, in their words
controllers.py  JobSet, Kueue and the scheduler, as far as Podway's use of them goes
nodes.py        TPU nodes: pods as processes in namespaces of their own, with the kubelet's exec and logs; they speak HTTP to the
                API and so serve a real one as well (`make test-kubernetes`)
running.py      all of it together, with a kubeconfig
"""
