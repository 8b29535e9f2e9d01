"""Training over a slow link: two nodes on one machine, this engine and its peers, in one run.

    python -m zero_engine.bench comm

Each node is a network namespace of Linux, and a limited veth pair is the only way between them
(`zero_engine.bench.comm.link`). torchrun starts the ranks of both.
"""
