"""Lightning's DeepSpeed strategies, as its documentation names them."""

from cases import Case

_RUN = ("--model={model}/llama", "--dataset={data}/text", "--output_dir={output}")
CASES = [
    Case(
        "Lightning",
        name,
        "lightning_docs.py",
        (way, *_RUN),
        ddp=("ddp", *_RUN),
        why_ddp="Lightning gives DeepSpeed the number of a GPU, and ends without one",
    )
    for way, name in (
        ("deepspeed_stage_2", 'strategy="deepspeed_stage_2"'),
        ("deepspeed_stage_3", 'strategy="deepspeed_stage_3"'),
        ("deepspeed_stage_2_offload", 'strategy="deepspeed_stage_2_offload"'),
        ("in_code", "DeepSpeedStrategy(stage=3, offload_optimizer, offload_parameters)"),
    )
]
