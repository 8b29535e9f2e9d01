"""``zero-engine run``: an unchanged DeepSpeed script with this engine in place of DeepSpeed.

    on_path/        folder for PYTHONPATH and PATH: installs the hook, and has DeepSpeed's launcher
    hook            imports ``deepspeed.*`` as ``zero_engine.deepspeed.*``, and patches accelerate,
                    Lightning and transformers
    run             the command

Every Python process with the hook imports ``hook``, which therefore imports no torch.
"""
