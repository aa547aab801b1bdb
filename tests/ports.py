"""A port that no other process gets until a process of the test listens there."""

import socket


class HeldPort:
    """A free loopback port, reserved as long as this object is open.

    A port that is only looked up may belong to another process a moment later. A server of the
    test can bind to this one with SO_REUSEADDR, because the socket that holds it does not listen.
    """

    def __init__(self):
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = self._socket.getsockname()[1]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """Releases the port."""
        self._socket.close()
