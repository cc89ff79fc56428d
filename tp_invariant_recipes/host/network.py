"""This machine's addresses, as other machines of the cluster see them."""

import socket


def address_towards(host: str) -> str:
    """The IPv4 address from which this machine reaches `host`. Raises OSError where there is no way to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # of a datagram socket: nothing is sent
        return probe.getsockname()[0]


def interface(address: str) -> str | None:
    """The name of the network interface that has this address; None: no interface of this machine has it."""
    import psutil

    found = psutil.net_if_addrs().items()
    return next((name for name, entries in found if any(entry.address == address for entry in entries)), None)
