"""Store through which ranks find each other, with nothing in it of ranks that are gone.

torchrun keeps one store for all its restarts (torch 2.5 on: pytorch issues 135712 and 167288), and
torch writes under the same names each time. A rank that is started anew may then read where a rank
of before was listening. So the ranks agree on a prefix that no earlier ones had.
"""

from __future__ import annotations

import json
import os
import time
import uuid

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from zero_core.errors import CollectiveError

_INTERVAL_S = 0.02
_LIMIT_S = 300.0
"""As long as torch's stores wait by default."""


def fresh_store() -> Store | None:
    """Return a store without entries for the ranks of this start. None: torch makes such a store.

    Every rank must call it, before ``init_process_group``, which takes the store, RANK and
    WORLD_SIZE.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return PrefixStore(agree_on_prefix(store, rank, world_size), store)


def agree_on_prefix(store: Store, rank: int, world_size: int) -> str:
    """Return a prefix that is new, the same on all ranks that are starting now.

    Rank 0 makes it. Another rank may still read the prefix of an earlier start. So it adds a number
    of its own under the prefix, and uses the prefix only when rank 0 has confirmed that number.

    Raises:
        CollectiveError: rank 0 has not confirmed one within five minutes.
    """
    if rank == 0:
        prefix = f"zero_engine/{uuid.uuid4().hex}"
        store.set("zero_engine/prefix", prefix)
        numbers = [store.get(f"{prefix}/number/{other}").decode() for other in range(1, world_size)]
        store.set(f"{prefix}/confirmed", json.dumps(numbers))
        return prefix
    own = uuid.uuid4().hex
    limit = time.monotonic() + _LIMIT_S
    while time.monotonic() < limit:
        prefix = store.get("zero_engine/prefix").decode()
        store.set(f"{prefix}/number/{rank}", own)
        while store.get("zero_engine/prefix").decode() == prefix and time.monotonic() < limit:
            confirmed = f"{prefix}/confirmed"
            if store.check([confirmed]) and own in json.loads(store.get(confirmed)):
                return prefix
            time.sleep(_INTERVAL_S)
    raise CollectiveError(
        f"rank {rank} of {world_size}: rank 0 has not confirmed this start within "
        f"{_LIMIT_S:.0f} s: is a rank of an earlier start still running?"
    )
