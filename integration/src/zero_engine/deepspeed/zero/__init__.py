"""``deepspeed.zero``: partitioned construction, and gathering of partitioned parameters.

`zero_engine.deepspeed.served` gives it the names of its submodules.
"""
