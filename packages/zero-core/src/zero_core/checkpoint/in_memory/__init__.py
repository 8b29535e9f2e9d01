"""Copies of all states in host memory, made after every step, for a restart without loss.

[Note: two slots]
Each rank keeps its slice of every state in files of a folder in memory, one file per state in the
form of a checkpoint's. Two slots take turns: one is written while the other is whole. A rank's
*marker* has all that is no tensor, and vouches for itself. It is removed before the rank's files
are overwritten, and renamed into place after them. A rank writes into a slot after an update, so
after the statistics of that step's gradient were summed over all ranks; and it waits for its last
copy before it adds to that sum. So the other slot is whole on every rank then, copies on other
nodes included.

Copies are made by a thread beside the next forward and backward, which do not write states. The
next update waits for it.

[Note: whose memory]
The folder is in ``/dev/shm``, named after the launcher (torchrun) that starts ranks anew. A process
of its own keeps it (`keeper`): that removes it when the launcher and all ranks have ended, whatever
killed them. What remains where the keeper was killed, too, is removed by the next job of the user
on the machine. Each rank also sends its slice to a rank of the next node, which keeps it beside its
own.

A folder belongs to one folder of checkpoints, so that engines that save apart are kept apart.
Data in memory has no checksums until a restart: a CRC-32 takes longer than the copy.
"""
