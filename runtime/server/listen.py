"""The sockets of a server, bound before anything that takes long."""

from __future__ import annotations

import contextlib
import errno
import socket

from ...custom_ops.errors import PagegraftError

__all__ = ["AddressError", "address_error", "bind"]

#: Of a name with several addresses those are left out that this machine cannot have, as with IPv6 switched off.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class AddressError(PagegraftError, OSError):
    """A host or port at which this process cannot listen."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to every address of a host, not listening yet. Port 0: one that is free. Raises AddressError."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AddressError(
            f"the host '{host}' is unknown ({reason}); give --host a name or address of this machine"
        ) from None
    with contextlib.ExitStack() as on_error:
        sockets: list[socket.socket] = []
        refusal: OSError | None = None
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                each = on_error.enter_context(socket.socket(family, kind, protocol))
                _set_options(each)
                each.bind((address[0], port, *address[2:]))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise address_error(error, host, port) from None
                refusal = error
                continue
            port = each.getsockname()[1]
            sockets.append(each)
        if not sockets and refusal is not None:
            raise address_error(refusal, host, port)
        on_error.pop_all()
    return sockets


def _set_options(each: socket.socket) -> None:
    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last server's connections may linger
    if each.family == socket.AF_INET6:
        each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # the other family has a socket of its own


def address_error(error: OSError, host: str, port: int) -> AddressError:
    """The system's refusal to bind or listen in our words."""
    if error.errno == errno.EADDRINUSE:
        return AddressError(f"port {port} of {host} is in use by another program; choose another with --port")
    if error.errno in _NOT_HERE:
        return AddressError(f"{host} is no address of this machine; give another with --host")
    if error.errno in (errno.EACCES, errno.EPERM):
        return AddressError(f"port {port} of {host} is not allowed to this user; choose one above 1023 with --port")
    return AddressError(f"port {port} of {host} cannot be opened ({error.strerror or error}); choose another")
