"""This machine's addresses, as seen by other machines of the cluster."""

import socket


def address_towards(host: str) -> str:
    """Return the IPv4 address from which this machine reaches `host`. Raises OSError without a route to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # connecting a datagram socket sends nothing
        return probe.getsockname()[0]


def interface(address: str) -> str | None:
    """Return the name of the network interface that has this address; None: no interface of this machine has it."""
    import psutil

    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if any(entry.address == address for entry in entries)), None)
