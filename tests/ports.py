"""A port that is nobody else's until a test's own process listens there."""

import socket


class HeldPort:
    """A free port of loopback, which goes to nobody who asks for any port while it is held.

    A port that is only looked up may be another process's a moment later. Who asks for this one
    gets it with SO_REUSEADDR, as servers have it: the socket that holds it does not listen.
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
        """Gives it back."""
        self._socket.close()
