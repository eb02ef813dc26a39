"""TPU slices on Kubernetes: JobSets whose pods are the hosts."""
