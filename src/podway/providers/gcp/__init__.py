"""Cloud TPUs of Google Cloud: offers and quota, requests, the state of nodes and queues, hosts over ssh."""
