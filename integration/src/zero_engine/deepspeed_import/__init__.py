"""Import of DeepSpeed's own checkpoints, of ZeRO's stages and universal ones.

`zero_engine.deepspeed_import.importing.import_checkpoint` starts a process of its own (`child`),
without network, which reads the files (by `stages`) into a
`source.Source` and writes a checkpoint of zero-core. No class of the files is imported and no
function in them is called. This file imports nothing: the process gives up the network before torch
starts threads.
"""
