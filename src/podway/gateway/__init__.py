"""The data plane: takes requests for services and their models, and passes them to replicas that are ready.

It is a process of its own (`podway gateway`), so that streams flow on while the control plane is restarted. It knows no store:
what it may do stands in a `RouteTable`, which the server sends and a file keeps.

    connection (a client's HTTP) -> proxy (who, which service) -> forward (which replica) -> upstream (a replica's HTTP)
                                 <-                     relay (the answer)                 <-

`table`, `balance`, `limits`, `wire`, `openai` and `tgi` are pure; sockets are in `connection` and `upstream` alone.
"""
