"""Container images without a container runtime: a directory as one layer over a base image, pushed by the registry's HTTP API.

reference.py    names of images
login.py        the logins that docker, podman and their helpers keep on this machine
registry.py     the calls (OCI distribution specification), and what went wrong in one sentence
layer.py        a directory as a layer that has the same bytes each time
build.py        base + layer -> a new image; only contents that the registry lacks are sent
"""
