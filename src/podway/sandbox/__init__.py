"""A pretend Google Cloud for TPUs on this machine: the APIs, the queues, the faults and real hosts behind them."""
