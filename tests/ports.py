"""A port that no other process gets until a process of the test listens there."""

import socket


class HeldPort:
    """A free loopback port, reserved as long as this object is open.

    A port that is only looked up may belong to another process a moment later. A server of the
    test can bind to this one with SO_REUSEADDR, because the socket that holds it does not listen.
    It is free at every address, as servers need it that listen at all of them: a connection from
    ::1 may use a port that is free at 127.0.0.1.
    """

    def __init__(self):
        is_dual = socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_dual:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind(("", 0))
        self.number = self._socket.getsockname()[1]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """Releases the port."""
        self._socket.close()
