"""The harness under all experiments, bottom up.

[Note: harness]
models   the models that are trained
job      a contender with one model, as plain data: the settings of every race
ranks    fresh rank processes and their results, by one runner; `rank` is their program
sides    the contenders' code: this engine, plain torch, DDP, FSDP2, DeepSpeed
memory   resident and device memory
tracing  the device's part of a step, from torch.profiler
train    the measuring loops
rounds   contenders in turn, round by round
report   rows as JSON, tables, Markdown and pictures, section by section
text     training on real text
options  command-line options that several experiments share
"""
