# SPDX-License-Identifier: Apache-2.0
"""What a run on one machine shows to others: nothing."""

from pathlib import Path

import pytest

from tp_invariant_recipes.launch import local

LOOPBACK, ANY = "0100007F", "00000000"  # as /proc/net/tcp writes 127.0.0.1 and 0.0.0.0


def listening(port: int) -> set[str]:
    """The addresses at which a port takes connections."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    places = (place.split(":") for _, place, _, state, *_ in lines if state == "0A")
    return {address for address, number in places if int(number, 16) == port}


@pytest.mark.parametrize("nodes, address", ((1, LOOPBACK), (2, ANY)))
def test_the_store_of_one_machine_listens_for_this_machine_alone(nodes, address):
    from torch.distributed import TCPStore

    store = local.store(nodes=nodes)
    assert listening(store.port) == {address}
    TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False).set("key", "value")
    assert store.get("key") == b"value"
