"""Variables in which launchers number the ranks of a node."""

LOCAL_RANK_OF = {
    "torchrun": "LOCAL_RANK",
    "Open MPI": "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPICH": "MPI_LOCALRANKID",
    "Cray PALS": "PMI_LOCAL_RANK",
    "SLURM": "SLURM_LOCALID",
}
"""The variable of each launcher. A launcher may start another one: the innermost comes first."""
