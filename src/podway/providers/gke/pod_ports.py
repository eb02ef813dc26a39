"""A port of a pod, or of what the pod can reach, by a relay in it: nothing listens for it anywhere.

In Python, since that is in every image that runs an agent.
"""

# Joins stdin and stdout to an address, and says `+` once that takes the connection. Without a port the address is a Unix socket.
_RELAY = """\
import os, select, socket, sys
if sys.argv[2]:
    s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
else:
    s = socket.socket(socket.AF_UNIX)
    s.connect(sys.argv[1])
s.settimeout(None)
os.write(1, b"+")
p = select.poll()
p.register(0, select.POLLIN)
p.register(s, select.POLLIN)
while True:
    for fd, _ in p.poll():
        if fd == 0:
            data = os.read(0, 65536)
            if not data:
                p.unregister(0)
                s.shutdown(socket.SHUT_WR)
            s.sendall(data)
        else:
            data = s.recv(65536)
            if not data:
                sys.exit()
            os.write(1, data)
"""
ACCEPTED = b"+"


def relay_words(address: str, port: int | None) -> list[str]:
    """The command in the pod."""
    return ["python3", "-S", "-E", "-c", _RELAY, address, "" if port is None else str(port)]
