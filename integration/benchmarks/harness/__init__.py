"""Code shared by all experiments. A contender is a library, or a setting, that they compare.

[Note: harness]
models   the models that contenders train
job      settings of a contender and its model, as plain data
ranks    starts rank processes and collects their results; `rank` is the processes' program
sides    the contenders: this engine, plain torch, DDP, FSDP2, DeepSpeed
memory   resident and device memory
train    the measuring loops, and the device time of a step from torch.profiler
rounds   runs contenders in turn, round by round
report   rows as JSON, tables and pictures
options  command-line options shared by several experiments
"""
