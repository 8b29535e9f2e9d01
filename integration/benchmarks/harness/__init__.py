"""The harness of all experiments.

[Note: harness]
models   the trained models
job      a contender with one model, as plain data
ranks    starts rank processes and collects their results; `rank` is the processes' program
sides    the contenders: this engine, plain torch, DDP, FSDP2, DeepSpeed
memory   resident and device memory
train    the measuring loops, and the device time of a step from torch.profiler
rounds   runs contenders in turn, round by round
report   rows as JSON, tables and pictures
options  command-line options shared by several experiments
"""
