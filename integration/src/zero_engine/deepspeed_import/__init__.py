"""Import of checkpoints that DeepSpeed wrote, at any ZeRO stage or universal.

`importing.import_checkpoint` starts a process (`child`), without network if possible. The process
reads the files into a `source.Source`, as ``torch.load(weights_only=True)`` reads them, and writes
zero-core's checkpoint. This file imports nothing, because the process leaves the network before
torch starts threads.
"""
