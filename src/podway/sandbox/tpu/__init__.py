"""The Cloud TPU API: nodes, queued resources, capacity and operations, over REST and gRPC."""
