"""Old name of ``python integration/benchmarks/run.py offload_cuda``."""

from zero_engine.bench import run

if __name__ == "__main__":
    run("offload_cuda")
