"""Engine internals for adapters of other interfaces, in addition to the public API.

`zero_engine` uses these names, for example for its DeepSpeed and Lightning interfaces.
"""

from zero_core._libc import release_free_pages
from zero_core._torch import storage_of
from zero_core.comm.control import ControlGroup
from zero_core.comm.device import make_transport, share_memory
from zero_core.comm.groups import Ranks
from zero_core.comm.meter import Meter
from zero_core.comm.notices import write_error_file
from zero_core.comm.place import OUTSIDE, Place
from zero_core.comm.topology import count_per_node, find_ranks
from zero_core.core.access import Cures, derive, is_refused, open_all, own_class, use_class
from zero_core.init.deferred import Recording, is_recorded_innermost, recorded, zeroed
from zero_core.init.values import gathered_slices, put_in_slices, slices
from zero_core.layout.arithmetic import ParamSpec
from zero_core.layout.discovery import (
    is_storage_dtype,
    note_reader,
    plain_name,
    stored_tensors,
)
from zero_core.lifecycle import EngineParameter
from zero_core.object_methods import ObjectMethods
from zero_core.optim.adam import Adam
from zero_core.optim.factory import check_served, make_optimizer
from zero_core.optim.muon import tag_matrices
from zero_core.parts import install_command
from zero_core.record.environment import available_cores, memory_limit_bytes, read_text

__all__ = [
    "OUTSIDE",
    "Adam",
    "ControlGroup",
    "Cures",
    "EngineParameter",
    "Meter",
    "ObjectMethods",
    "ParamSpec",
    "Place",
    "Ranks",
    "Recording",
    "available_cores",
    "check_served",
    "count_per_node",
    "derive",
    "find_ranks",
    "gathered_slices",
    "install_command",
    "is_recorded_innermost",
    "is_refused",
    "is_storage_dtype",
    "make_optimizer",
    "make_transport",
    "memory_limit_bytes",
    "note_reader",
    "open_all",
    "own_class",
    "plain_name",
    "put_in_slices",
    "read_text",
    "recorded",
    "release_free_pages",
    "share_memory",
    "slices",
    "storage_of",
    "stored_tensors",
    "tag_matrices",
    "use_class",
    "write_error_file",
    "zeroed",
]
