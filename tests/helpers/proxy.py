"""A line between a client and a server of the tests, which stalls, or breaks in the middle of what is sent."""

import contextlib
import socket
import struct
import threading
import time

CHUNK = 2**14


class Line:
    """Forwards connections on a free port of this machine to another port of it.

    Attributes:
        port: its own port.
        breaks: whether connections break.
        after: bytes that pass, towards the client or the server, before a connection breaks.
        towards: which of them counts: "client" or "server".
        stalls_after: bytes towards the client after which a connection passes on nothing more, but does not break;
            `None` for a line in order.
        broken: connections that broke.
    """

    def __init__(self, port: int) -> None:
        self.breaks, self.after, self.towards = False, 0, "client"
        self.stalls_after: int | None = None
        self.broken = 0
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def break_after(self, nbytes: int, towards: str) -> None:
        """Break connections, those that exist too, as soon as so many bytes have passed in one direction."""
        self.drop_all()
        self.breaks, self.after, self.towards = True, nbytes, towards

    def mend(self) -> None:
        """Be a line in order."""
        self.breaks, self.stalls_after = False, None

    def drop_all(self) -> None:
        """Break all connections."""
        with self._lock:
            found, self._sockets = self._sockets, set()
        for each in found:
            _reset(each)

    def close(self) -> None:
        """Accept nothing any more."""
        self.mend()
        # Closing alone does not wake up a thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._server_port))
                with self._lock:
                    self._sockets |= {client, server}
                for source, target, towards in ((client, server, "server"), (server, client, "client")):
                    threading.Thread(target=self._pass_on, args=(source, target, towards), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, towards: str) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(CHUNK):
                while towards == "client" and self.stalls_after is not None and passed >= self.stalls_after:
                    time.sleep(0.01)
                if self.breaks and towards == self.towards and passed + len(piece) > self.after:
                    self.broken += 1
                    target.sendall(piece[: self.after - passed])
                    break
                target.sendall(piece)
                passed += len(piece)
        for each in (source, target):
            with self._lock:
                self._sockets.discard(each)
            _reset(each)


def _reset(connection: socket.socket) -> None:
    """Close a connection so that the other side learns that it broke, and not that all was sent."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
