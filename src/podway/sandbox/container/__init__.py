"""The Kubernetes Engine API as far as node pools go: clusters that are only a name, their node pools, and operations."""
