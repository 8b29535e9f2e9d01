"""``deepspeed.accelerator``: the devices that ranks compute on, over torch.accelerator.

`zero_engine.deepspeed.served` gives it the names of its submodules.
"""
