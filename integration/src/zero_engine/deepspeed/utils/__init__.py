"""``deepspeed.utils``. `zero_engine.deepspeed.served` gives it the names of its submodules."""
