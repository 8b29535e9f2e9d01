"""``deepspeed.utils``. `zero_engine.deepspeed.served` adds the names of the submodules."""
