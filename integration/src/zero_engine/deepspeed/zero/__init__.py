"""``deepspeed.zero``: partitioned construction, and gathering of partitioned parameters.

`zero_engine.deepspeed.served` adds the names of the submodules.
"""
