"""``zero-engine run``: an unchanged script of DeepSpeed with this engine behind the name.

    on_path/        the folder put on PYTHONPATH: metadata, and what starts the hook in a process
    hook            serves ``deepspeed.*`` as the modules ``zero_engine.deepspeed.*``, and has the
                    variables by which processes get it
    mends           changes of accelerate, Lightning and transformers
    run             the command

Imported by every Python process that the hook reaches: nothing here imports torch at the top, but
``run``.
"""
