"""TCP ports for servers and rendezvous."""

import errno
import random
import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of an address of this machine that is not in use now; OSError for an address that is not its own.

    A server may bind it only a minute later. It is below the ports of outgoing connections (Linux: 32768 and above),
    so that none of these takes it until then.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
            try:
                s.bind((host, port))
                return port
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
