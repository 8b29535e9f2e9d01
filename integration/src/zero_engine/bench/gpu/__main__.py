"""Old name of ``python integration/benchmarks/run.py gpu``."""

from zero_engine.bench import run

if __name__ == "__main__":
    run("gpu")
