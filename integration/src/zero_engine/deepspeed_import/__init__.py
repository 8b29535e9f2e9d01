"""Import of checkpoints that DeepSpeed wrote, at any ZeRO stage or universal.

`importing.import_checkpoint` starts a process without network (`child`), which reads the files
(`stages`) into a `source.Source` and writes zero-core's checkpoint. No class in the
files is imported and no function is called. This file imports nothing, because the process leaves
the network before torch starts threads.
"""
